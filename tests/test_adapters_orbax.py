"""Training states are restored exactly, or not at all."""

import dataclasses
import errno
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax import models
from areax.adapters import orbax
from areax.core import optim, param, step
from areax.parallel import mesh, rules


def fresh(dtype="float32", width=4):
    params = {"w": jnp.arange(2 * width, dtype=dtype).reshape(2, width), "b": jnp.ones(width, dtype)}
    return step.init(params, optax.adamw(1e-3))


def test_a_round_trip_keeps_dtypes_and_values(tmp_path):
    before = fresh()
    with orbax.open_store(tmp_path / "state") as store:
        assert store.latest is None
        store.save(3, before, {"next": 7, "open": [1, 2]})
    with orbax.open_store(tmp_path / "state") as store:
        assert store.latest == 3
        after, cursor = store.restore(fresh())
    assert cursor == {"next": 7, "open": [1, 2]}
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["a[1]", "a\\b"])
def test_a_path_that_orbax_does_not_read_again_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="states need a path without .*, which Orbax takes for a pattern"):
        with orbax.open_store(tmp_path / name):
            pass


def test_the_newest_two_states_are_kept(tmp_path):
    with orbax.open_store(tmp_path) as store:
        for v in range(4):
            store.save(v, fresh())
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 3]


def test_a_state_may_take_days_and_one_that_is_given_up_is_named(tmp_path):
    """Orbax gives up by a clock that may jump, after 20 minutes unless told otherwise."""
    with orbax.open_store(tmp_path / "state") as store:
        manager = store._checkpointer._async_manager
        assert manager._timeout_secs > 86400
        manager._timeout_secs = 1e-6
        with pytest.raises(OSError, match="state: version 1 could not be written: .*timed out"):
            store.save(1, {"x": {"w": np.ones((500, 500))}})
            store.wait()


def test_one_process_of_a_job_may_look_at_the_newest_state(tmp_path, monkeypatch):
    with orbax.open_store(tmp_path) as store:
        store.save(3, fresh(), {"next": 7})
    monkeypatch.delattr(orbax.Store, "_checkpointer")  # whose calls wait for all processes
    assert orbax.newest(tmp_path) == (3, {"next": 7})


def test_a_state_is_checked_and_written_without_a_copy_of_it(tmp_path):
    state = {"w": jnp.ones((300, 500)), "v": jnp.ones((2, 70_000))}
    used = orbax._zeros.lower(list(state.values())).compile().memory_analysis().temp_size_in_bytes
    assert used < 0.1 * sum(x.nbytes for x in state.values())
    with orbax.open_store(tmp_path) as store:
        store.save(1, state)
        assert (tmp_path / "1" / orbax.HASHES).is_file()  # a step that follows finds nothing in use
    written = sum(file.stat().st_size for file in (tmp_path / "1").rglob("*") if file.is_file())
    assert written > sum(x.nbytes for x in state.values())  # not compressed, even if it were easy


def test_a_state_of_another_structure_is_refused(tmp_path):
    with orbax.open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="needed, got none"):
            store.restore(fresh())
        store.save(0, fresh())
        with pytest.raises(RuntimeError, match="already exists"):
            store.save(0, fresh())
        with pytest.raises(ValueError, match=r"float32\[4\] and .*bfloat16\[4\]; resume"):
            store.restore(fresh("bfloat16"))
        with pytest.raises(ValueError, match=r"\[4\] and .*\[5\]"):
            store.restore(fresh(width=5))


@pytest.mark.slow
def test_a_state_saved_on_one_mesh_is_the_same_on_any_other(tmp_path):
    """Weights, moments and counters, bit for bit, after a step that changed them all."""
    hf = dict(
        model_type="qwen3", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    table = models.table(models.config_from_hf(hf))
    optimizer = optim.make_optimizer(optim.Optimizer(lr=1e-2), table)

    def on(layout):
        shardings = rules.of_state(optimizer, table, mesh.make(layout))
        draw = jax.jit(lambda key: param.init(key, table), out_shardings=shardings.params)
        return shardings, step.init(draw(jax.random.key(0)), optimizer, shardings)

    @jax.jit
    def moved(current):
        grads = jax.tree.map(jnp.sin, current.params)
        updates, opt_state = optimizer.update(grads, current.opt_state, current.params)
        return step.State(optax.apply_updates(current.params, updates), opt_state, current.step + 1)

    shardings, start = on(mesh.Layout(fsdp=8))
    saved = jax.device_put(moved(start), shardings)
    with orbax.open_store(tmp_path) as store:
        store.save(1, saved, {"row": 7})
    for layout in (mesh.Layout(dp=2, tp=4), mesh.Layout()):
        shardings, like = on(layout)
        with orbax.open_store(tmp_path) as store:
            got, cursor = store.restore(like)
        assert cursor == {"row": 7} and jax.tree.structure(got) == jax.tree.structure(saved)
        for x, wanted, other, sharding in zip(*map(jax.tree.leaves, (got, saved, start, shardings)), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
            np.testing.assert_array_equal(x, wanted)
            assert x.dtype == wanted.dtype and (np.asarray(x) != np.asarray(other)).any()


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_states(tmp_path_factory):
    """A directory with states 1 and 2."""
    path = tmp_path_factory.mktemp("state")
    with orbax.open_store(path) as store:
        for v in (1, 2):
            store.save(v, fresh(), {"row": v})
    return path


def files(directory):
    return sorted(file for file in directory.rglob("*") if file.is_file())


def damaged(file, at, how):
    data = bytearray(file.read_bytes())
    if how == "cut":
        del data[at:]
    elif how == "flipped":
        data[at] ^= 1 << at % 8
    file.write_bytes(data)
    if how == "gone":
        file.unlink()


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_any_damage_to_the_newest_state_falls_back_to_the_one_before(two_states, tmp_path, caplog, how):
    """Every file that is written for a state, each at three places."""
    names = [file.relative_to(two_states) for file in files(two_states / "2")]
    assert len(names) > 8
    for n, name in enumerate(names):
        for k in range(3 if how == "flipped" else 1):
            path = tmp_path / f"{n}-{k}"
            shutil.copytree(two_states, path)
            size = (path / name).stat().st_size
            if not size:  # gone is the only damage to an empty file
                (path / name).unlink()
            else:
                damaged(path / name, (k * size // 3 + 7 * n) % size, how)
            caplog.clear()
            with orbax.open_store(path) as store:
                assert store.latest == 1, name
                assert store.restore(fresh())[1] == {"row": 1}
            assert (path / "2.damaged").is_dir() and not (path / "2").exists()
            assert "set aside, using 1 instead" in caplog.text


def test_a_run_does_not_start_over_if_no_state_is_whole(two_states, tmp_path):
    path = tmp_path / "state"
    shutil.copytree(two_states, path)
    for v in (1, 2):
        damaged(path / f"{v}/_CHECKPOINT_METADATA", 0, "flipped")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"none of the saved states is whole \(2: _CHECKPOINT_METADATA is dam.*1: "
        ):
            with orbax.open_store(path):
                pass
    assert sorted(p.name for p in path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("name", ["0000000003", "99999999999999999999", "007", "\u0664", "1e3", "3.damaged"])
def test_a_directory_that_is_no_state_of_that_version_is_not_used(two_states, tmp_path, name):
    """Among them a copy of a state under another number: its hashes say which version it is."""
    path = tmp_path / "state"
    shutil.copytree(two_states, path)
    shutil.copytree(path / "1", path / name)
    with orbax.open_store(path) as store:
        assert store.latest == 2


def test_a_run_does_not_start_over_beside_states_that_were_set_aside(two_states, tmp_path):
    shutil.copytree(two_states / "2", tmp_path / "2.damaged")
    with pytest.raises(ValueError, match=r"none of the saved states is whole \(2.damaged\)"):
        with orbax.open_store(tmp_path):
            pass


def test_what_is_beside_the_files_of_a_state(two_states, tmp_path):
    """Further files do not matter; one that cannot be read is damage; files under our own names are removed."""
    path = tmp_path / "state"
    shutil.copytree(two_states, path)
    (path / "2/.DS_Store").write_text("")
    (path / ".9.writing").write_text("")
    with orbax.open_store(path) as store:
        assert store.latest == 2
    (path / "2/broken").symlink_to("nowhere")
    (path / "2.damaged").write_text("")
    with orbax.open_store(path) as store:
        assert store.latest == 1
    assert (path / "2.damaged").is_dir() and not (path / ".9.writing").exists()


def test_numbers_that_are_not_finite_are_not_saved_over_a_good_state(tmp_path):
    good = fresh()
    bad = dataclasses.replace(good, params={**good.params, "w": good.params["w"].at[0, :3].set(jnp.nan)})
    with orbax.open_store(tmp_path) as store:
        store.save(1, good)
        line = r"version 2 is not saved, 3 of the 8 numbers of params.w are not finite; the newest good state is 1"
        with pytest.raises(ValueError, match=line):
            store.save(2, bad)
        assert store.latest == 1
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_number_that_is_not_finite_is_found_on_any_device(dtype, bad):
    over = jax.sharding.NamedSharding(jax.make_mesh((4,), ("fsdp",)), jax.sharding.PartitionSpec("fsdp"))
    for place in range(4):
        x = jnp.ones((4, 6)).at[place, 2].set(bad).astype(dtype)
        found = orbax._not_finite({"n": np.arange(3), "x": jax.device_put(x, over)})
        assert found == "1 of the 24 numbers of x are not finite"
    assert orbax._not_finite({"x": jax.device_put(jnp.ones((4, 6), dtype), over)}) == ""


def test_older_states_stay_until_a_newer_one_is_complete(tmp_path, monkeypatch):
    """Of a save whose files are written, but not their hashes, nothing remains, and nothing older was removed."""
    with orbax.open_store(tmp_path, keep=1) as store:
        store.save(1, fresh(), {"row": 1})
        with monkeypatch.context() as patch:
            patch.setattr(orbax.safetensors, "write_bytes", full)
            with pytest.raises(OSError, match="no space left"):  # at once: on a CPU it is written before the next step
                store.save(2, fresh(), {"row": 2})
    with orbax.open_store(tmp_path) as store:
        assert store.latest == 1 and store.restore(fresh())[1] == {"row": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_one_line(tmp_path):
    """What the disk refuses comes from Orbax's threads, which log it with tracebacks, too."""
    program = """
import resource, sys
import jax.numpy as jnp
from areax.adapters import orbax
try:
    with orbax.open_store(sys.argv[1]) as store:
        store.save(1, {"x": jnp.arange(999.0)})
        store.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        store.save(2, {"x": jnp.arange(999.0)})
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    line = f"{tmp_path}: version 2 could not be written: File too large\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
    with orbax.open_store(tmp_path) as store:
        assert store.latest == 1


def full(path, data):
    raise OSError(errno.ENOSPC, "no space left on device")


def test_leftovers_of_a_killed_run_are_removed(two_states, tmp_path):
    path = tmp_path / "state"
    shutil.copytree(two_states, path)
    shutil.copytree(path / "2", path / ".3.writing")
    shutil.copytree(path / "2", path / ".3.writing.orbax-checkpoint-tmp")
    with orbax.open_store(path) as store:
        assert store.latest == 2
    assert sorted(p.name for p in path.iterdir()) == ["1", "2"]


# -- arrays --------------------------------------------------------------------------------------


def test_arrays_of_a_state_are_read_by_name(two_states, tmp_path):
    """Without what made it, one at a time, until the run removes it."""
    shutil.copytree(two_states, tmp_path / "state")
    state = fresh("bfloat16")
    with orbax.open_store(tmp_path / "state") as store:
        store.save(3, {"policy": state, "reference": state.params}, {"row": 3})
    with orbax.opened(tmp_path / "state", 3) as (arrays, cursor):
        assert cursor == {"row": 3}
        for name, wanted in (("policy.params.w", state.params["w"]), ("reference.b", state.params["b"])):
            assert arrays[name].shape == wanted.shape and arrays[name].dtype == wanted.dtype
            got = arrays[name].read()
            assert isinstance(got, np.ndarray) and got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
        assert "policy.opt_state.0.mu.w" in arrays and int(arrays["policy.step"].read()) == 0
        shutil.rmtree(tmp_path / "state/3")
        with pytest.raises(ValueError, match=r"state/3: its run has removed it meanwhile; name a newer step"):
            arrays["reference.w"].read()


def test_a_version_that_cannot_be_read_is_refused_and_left_alone(two_states, tmp_path):
    path = tmp_path / "state"
    with pytest.raises(ValueError, match="a saved state is needed, got none"):
        orbax.verified(path)
    shutil.copytree(two_states, path)
    assert orbax.verified(path) == 2 and orbax.verified(path, 1) == 1
    with pytest.raises(ValueError, match="there is no state of step 7; kept are those of 1, 2"):
        orbax.verified(path, 7)
    (path / "2/hashes.json").unlink()
    before = files(path)
    with pytest.raises(ValueError, match=r"state/2: hashes.json is missing; kept are those of 1, 2, so choose another"):
        orbax.verified(path)
    assert files(path) == before and orbax.verified(path, 1) == 1
