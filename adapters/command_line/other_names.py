"""Option names of other libraries: aliases where the meaning is identical, and what to use instead of the others.

docs/migrating.md shows these tables; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

ALIASES = {  # name elsewhere -> option here
    "learning-rate": "optim.lr",
    "lr": "optim.lr",
    "num-generations": "group-size",
    "model-name-or-path": "model",
    "output-dir": "out",
    "max-steps": "steps",
}

TRACK = (
    "`--track.tensorboard`, `--track.wandb`, `--track.trackio`, `--track.mlflow`, `--track.swanlab`, "
    "`--track.prometheus`"
)


@dataclass(frozen=True)
class Names:
    """The options of one library.

    Attributes:
      library: the library's name.
      source: where it defines the names.
      rows: (its names, what to use here), in Markdown. `=` is what areax always does, without an option. Every name in
        backquotes counts; one that ends with * is a prefix.
    """

    library: str
    source: str
    rows: tuple[tuple[str, str], ...]


TRL_GRPO = Names(
    "TRL",
    "`GRPOConfig` of TRL 1.16",
    (
        ("`generation_batch_size` (completions)", "`--groups` x `--group-size`"),
        ("`steps_per_generation`", "`--minibatches` = steps_per_generation / gradient_accumulation_steps"),
        ("`num_iterations`", "`--epochs`"),
        (
            "`per_device_train_batch_size`",
            "`--rows` packed rows of `--length` tokens per microbatch, over all devices; `--groups` x `--group-size` "
            "completions per batch",
        ),
        (
            "`gradient_accumulation_steps`",
            "= (as many microbatches of `--rows` rows as `--groups` / `--minibatches` fill)",
        ),
        ("`num_train_epochs`", "`--steps` = epochs x prompts / `--groups`"),
        ("`num_generations_eval`", "`--heldout-samples`"),
        ("`max_completion_length`, `generation_kwargs.max_new_tokens`", "`--sampling.max-new-tokens`"),
        ("`max_prompt_length`", "`--max-prompt`, which leaves longer prompts out"),
        ("`temperature`", "`--sampling.temperature`"),
        (
            "`top_p`, `top_k`, `min_p`",
            "`--sampling.top-p`, `--sampling.top-k` and `--sampling.min-p` with `--sampling.sampling-mask`",
        ),
        ("`repetition_penalty`", "none in training: samples come from the full distribution"),
        ("`beta`", "`--objective.kl.coef`"),
        ("`use_bias_correction_kl` (TRL: on)", "`--objective.kl.ratio` (off)"),
        ("`sync_ref_model`, `ref_model_sync_steps`", "`--reference-every`"),
        ("`ref_model_mixup_alpha`", "`--reference-mix`"),
        ("`epsilon`", "`--objective.clip-low`; `--objective.clip-high` is a bound of its own"),
        ("`epsilon_high`", "`--objective.clip-high`"),
        ("`delta`", "`--objective.ratio-cap`"),
        (
            "`sapo_temperature_pos`, `sapo_temperature_neg`",
            "`areax train sapo`, `--objective.tau-pos`, `--objective.tau-neg`",
        ),
        ("`vespo_k_pos`, `vespo_lambda_pos`", "`areax train vespo`, `--objective.vespo-pos` K LAMBDA"),
        ("`vespo_k_neg`, `vespo_lambda_neg`", "`areax train vespo`, `--objective.vespo-neg` K LAMBDA"),
        ("`shuffle_dataset`", "`--curriculum.order` shuffled (the default)"),
        ("`environment_factory`", "`--env` FILE.py:CLASS"),
        (
            "`max_tool_calling_iterations`",
            "`turns` in `--env-options`; or in `--workflow-options`, with `--workflow "
            "areax.rollout.workflows.multi_turn:tool_loop`",
        ),
        ("`cast_lm_head_to_fp32`", "= (log-probabilities are computed in fp32)"),
        (
            "`use_liger_kernel`, `use_liger_loss`",
            "= (the loss never holds the logits of all tokens; `--run.head-chunk`)",
        ),
        ("`use_transformers_continuous_batching`, `use_transformers_paged`", "= (the servers' way)"),
        (
            "`loss_type`",
            "dapo, grpo: `--objective.denominator` token, sequence; dr_grpo: `areax train drgrpo "
            "--objective.denominator-tokens N`; cispo, sapo, luspo, vespo: `areax train cispo`, ... (CISPO's bound "
            "is 1 + clip_high here, epsilon_high itself there); bnpo: none, the mean never depends on microbatches",
        ),
        ("`scale_rewards`", "`--objective.advantage.std` group, batch, none"),
        ("`importance_sampling_level`", "`--objective.ratio` token, sequence"),
        (
            "`vllm_importance_sampling_mode`",
            "token_truncate, token_mask: `--objective.correction.action` truncate, mask; sequence_...: and "
            "`--objective.correction.level` sequence",
        ),
        ("`vllm_importance_sampling_clip_max`, `vllm_importance_sampling_cap`", "`--objective.correction.cap`"),
        ("`vllm_importance_sampling_clip_min`", "`--objective.correction.low`"),
        ("`off_policy_mask_threshold`", "`--objective.correction.drift`"),
        ("`mask_truncated_completions`", "`--objective.shaping.truncated` mask"),
        ("`entropy_coef`", "`--objective.entropy.coef`"),
        ("`top_entropy_quantile`", "none: no token is left out because of its entropy"),
        ("`entropy_target`", "`--objective.entropy.floor`"),
        (
            "`reward_funcs`, `reward_weights`",
            "`--reward`: one function that returns a dict of named parts; weights are in the function",
        ),
        ("`remove_unused_columns`", "= (a reward sees the whole row)"),
        (
            "`multi_objective_aggregation` normalize_then_sum",
            "`--objective.advantage.components`, `--objective.advantage.component-weights`",
        ),
        ("`vllm_mode` colocate, `vllm_enable_sleep_mode`", "`--colocated`, `--serve.inside`"),
        (
            "`use_vllm`, `vllm_*`",
            "`--servers`, addresses of vLLM or SGLang; none = the run starts its own",
        ),
        ("`log_completions`", "`--samples-every`"),
    ),
)
TRL_OFFLINE = Names(
    "TRL",
    "`SFTConfig`, `DPOConfig` and `GKDConfig` of TRL 1.16: `areax train sft`, `dpo`, `distill`",
    (
        (
            "`per_device_train_batch_size`, `gradient_accumulation_steps`",
            "`--batch` rows per optimiser step, over all devices and microbatches; `--rows` packed rows per microbatch",
        ),
        ("`num_train_epochs`", "`--steps` = epochs x rows / `--batch`"),
        ("`max_length`, `max_seq_length`", "`--length`"),
        ("`max_prompt_length`, `max_completion_length`", "`--length`, prompt and completion together"),
        ("`truncation_mode`", "`--too-long` refuse, drop: a row is never cut"),
        ("`packing`, `padding_free`, `completion_only_loss`", "="),
        ("`assistant_only_loss`", "`--learn` all"),
        ("`beta`", "`--objective.beta`"),
        ("`loss_type`", "of preferences: `areax train dpo`, `ipo`, `simpo`, `cpo`, `orpo`, `kto`, `bco`"),
        ("`label_smoothing`", "`--objective.label-smoothing`"),
        ("`teacher_model_name_or_path`", "`--teacher`"),
        ("`lmbda`", "on-policy distillation: `areax train grpo` with a teacher"),
        (
            "`use_uld_loss`, `teacher_tokenizer_name_or_path` of GOLD",
            "a `--teacher` with another tokenizer, or `--teacher-tokenizer` "
            "([across tokenizers](distillation.md#across-tokenizers))",
        ),
        ("`uld_hybrid_unmatched_weight`", "`--objective.uld-coef`"),
        ("`dataset_text_field`", "`--row`, a function from records to rows"),
        (
            "`packing_strategy`, `eval_packing`, `pad_to_multiple_of`",
            "= (first fit decreasing into rows of `--length`)",
        ),
        ("`precompute_ref_log_probs`", "none: the reference scores each batch once"),
    ),
)
TRAINER = Names(
    "TRL",
    "`TrainingArguments` of transformers, `ModelConfig` and `ScriptArguments` of TRL 1.16",
    (
        ("`warmup_steps`", "`--optim.warmup`"),
        ("`warmup_ratio`", "`--optim.warmup`, in steps: ratio x `--steps`"),
        ("`lr_scheduler_type`", "`--optim.schedule`"),
        ("`lr_scheduler_kwargs`", "`--optim.floor`, the last learning rate as a share of `--optim.lr`"),
        ("`weight_decay`", "`--optim.weight-decay`"),
        ("`max_grad_norm`", "`--optim.clip`"),
        ("`adam_beta1`", "`--optim.b1`"),
        ("`adam_beta2`", "`--optim.b2`"),
        ("`adam_epsilon`", "`--optim.eps`"),
        ("`optim`", "`--optim.name`"),
        ("`save_steps`, `save_strategy`", "`--save-every`"),
        ("`save_total_limit`", "= (a run keeps its newest two states)"),
        (
            "`load_best_model_at_end`, `metric_for_best_model`, `greater_is_better`",
            "none: OUT/model has the last weights; `areax convert` exports another state",
        ),
        ("`overwrite_output_dir`", "none: another `--out` starts a new run"),
        ("`eval_steps`, `eval_strategy`", "`--evaluate-every`"),
        ("`eval_on_start`", "= (RL evaluates held-out rows before the first batch)"),
        ("`per_device_eval_batch_size`", "= (held-out rows need no batch size of their own)"),
        ("`logging_steps`, `logging_strategy`, `logging_first_step`", "= (every step is logged)"),
        ("`report_to`", TRACK),
        ("`logging_dir`", "`--track.tensorboard`, into OUT/tensorboard"),
        ("`run_name`", "`--out`; wandb's run has its name"),
        ("`resume_from_checkpoint`", "= (the same `--out` resumes)"),
        (
            "`gradient_checkpointing`, `gradient_checkpointing_kwargs`",
            "`--run.remat` full (the default on accelerators), dots (on a CPU), none, offload",
        ),
        ("`torch_compile`", "= (XLA compiles every step)"),
        ("`activation_offloading`", "`--run.remat` offload"),
        ("`router_aux_loss_coef`", "`--balance.load`"),
        ("`disable_dropout`", "= (no model has dropout)"),
        ("`trust_remote_code`", "none: families are areax's own code, no checkpoint's is run"),
        ("`bf16`, `fp16`, `dtype`, `torch_dtype`", "`--run.dtype` bfloat16; master weights stay fp32"),
        ("`attn_implementation`", "`--run.attention`"),
        ("`dataset_name`", "`--data owner/name`"),
        ("`dataset_config`, `dataset_train_split`", "`--data owner/name:configuration:split`"),
        ("`dataset_test_split`", "`--heldout owner/name:configuration:split`"),
        ("`dataset_streaming`", "`--limit` N streams the first N records"),
        ("`dataloader_num_workers`, `dataset_num_proc`", "none: rows are read without worker processes"),
        ("`data_seed`", "`--seed`, of new weights, prompt order and sampling"),
        ("`group_by_length`", "= (rows are packed)"),
        ("`auto_find_batch_size`", "`--rows` auto, the default: as many as fit by the plan"),
        ("`chat_template_path`", "none: the tokenizer's own template; `--chat-template-kwargs` gives it variables"),
        ("`use_peft`, `lora_r`", "`--lora.rank`"),
        ("`lora_alpha`", "`--lora.alpha`"),
        ("`lora_target_modules`", "`--lora.targets`"),
        ("`use_rslora`", "`--lora.rslora`"),
        ("`use_dora`", "`--lora.dora`"),
        ("`lora_dropout`", "none: adapters have no dropout"),
        ("`load_in_4bit`", "`--lora.base` nf4"),
        ("`load_in_8bit`", "`--lora.base` int8"),
        ("`deepspeed`, `fsdp`", "`--mesh.fsdp`, and the other axes of a mesh"),
        ("`push_to_hub`, `hub_model_id`", "none: OUT/model is a Hugging Face directory, for `hf upload`"),
    ),
)
VERL = Names(
    "verl",
    "`verl/trainer/config`; names may begin with `actor_rollout_ref.`",
    (
        ("`data.train_files`", "`--data`"),
        ("`data.val_files`", "`--heldout`"),
        ("`data.train_batch_size` (prompts)", "`--groups`"),
        ("`data.val_batch_size`", "= (held-out rows need no batch size of their own)"),
        ("`data.shuffle`", "`--curriculum.order` shuffled (the default)"),
        ("`data.seed`", "`--seed`"),
        ("`data.max_prompt_length`", "`--max-prompt`; with the completion at most `--length`"),
        ("`data.max_response_length`", "`--sampling.max-new-tokens`"),
        ("`data.apply_chat_template_kwargs`", "`--chat-template-kwargs`"),
        ("`data.filter_overlong_prompts`", "`--max-prompt`"),
        ("`data.truncation`", "= (prompts are never cut)"),
        ("`data.prompt_key`, `data.reward_fn_key`", "`--row`, a function from records to rows"),
        ("`data.image_key`", "none: the field `images` of rows, which `--row` can make"),
        ("`model.path`", "`--model`"),
        ("`rollout.n`", "`--group-size`"),
        ("`rollout.temperature`", "`--sampling.temperature`"),
        ("`rollout.top_p`, `rollout.top_k`", "`--sampling.top-p`, `--sampling.top-k` with `--sampling.sampling-mask`"),
        ("`rollout.val_kwargs.do_sample`", "`--heldout-samples`: 1 is greedy, more are sampled as in training"),
        ("`rollout.val_kwargs.n`", "`--heldout-samples`"),
        ("`rollout.name`", "`--servers`, addresses of SGLang or `areax serve`; none = the run starts its own"),
        ("`rollout.mode` async", "= (`--eta` bounds the staleness; 0 = synchronous)"),
        ("`rollout.max_num_seqs`", "`--serve.slots`, of servers that the run starts"),
        ("`rollout.max_model_len`", "`--serve.context`, of servers that the run starts"),
        ("`rollout.free_cache_engine`", "`--colocated`"),
        (
            "`rollout.multi_turn.enable`",
            "`--workflow areax.rollout.workflows.multi_turn:multi_turn`, `:tool_loop` there, or a file of your own",
        ),
        ("`rollout.multi_turn.max_assistant_turns`", "`turns` in `--workflow-options`"),
        ("`actor.optim.lr`", "`--optim.lr`"),
        ("`actor.optim.lr_warmup_steps`", "`--optim.warmup`"),
        ("`actor.optim.lr_warmup_steps_ratio`", "`--optim.warmup`, in steps: ratio x `--steps`"),
        ("`actor.optim.lr_scheduler_type`, `actor.optim.warmup_style`", "`--optim.schedule`"),
        ("`actor.optim.min_lr_ratio`", "`--optim.floor`"),
        ("`actor.optim.weight_decay`", "`--optim.weight-decay`"),
        ("`actor.optim.betas`", "`--optim.b1` and `--optim.b2`"),
        ("`actor.grad_clip`", "`--optim.clip`"),
        ("`actor.freeze_vision_tower` (verl: False)", "`--vision` frozen (as by default), trained"),
        ("`actor.ppo_mini_batch_size` (prompts)", "`--minibatches` = train_batch_size / ppo_mini_batch_size"),
        ("`actor.ppo_epochs`", "`--epochs`"),
        (
            "`actor.ppo_micro_batch_size_per_gpu`, `actor.ppo_max_token_len_per_gpu`, "
            "`rollout.log_prob_micro_batch_size_per_gpu`, `ref.log_prob_micro_batch_size_per_gpu`",
            "`--rows` x `--length` tokens, over all devices",
        ),
        ("`actor.use_dynamic_bsz`, `model.use_remove_padding`", "="),
        (
            "`algorithm.adv_estimator` gae, grpo, rloo, reinforce_plus_plus, remax, opo, gpg",
            "`areax train ppo`, `grpo`, `rloo`, `reinforceplusplus`, `remax`, `opo`, `gpg`",
        ),
        ("`algorithm.norm_adv_by_std_in_grpo` False", "`--objective.advantage.std` none"),
        ("`algorithm.gamma`", "`--objective.advantage.gamma`"),
        ("`algorithm.lam`", "`--objective.advantage.lam`"),
        ("`actor.clip_ratio`", "`--objective.clip-low` and `--objective.clip-high`"),
        ("`actor.clip_ratio_low`", "`--objective.clip-low`"),
        ("`actor.clip_ratio_high`", "`--objective.clip-high`"),
        ("`actor.clip_ratio_c` (verl: 3)", "`--objective.dual-clip` (off)"),
        (
            "`actor.loss_agg_mode` token-mean, seq-mean-token-sum, seq-mean-token-mean",
            "`--objective.denominator` token, sequence_sum, sequence",
        ),
        (
            "`actor.policy_loss.loss_mode` gspo, gpg, clip_cov, kl_cov, geo_mean, cispo",
            "`areax train gspo`, `gpg`, `clipcov`, `klcov`, `gmpo`, `cispo`",
        ),
        ("`actor.use_kl_loss`, `actor.kl_loss_coef`", "`--objective.kl.coef`"),
        ("`actor.kl_loss_type` kl, mse, low_var_kl", "`--objective.kl.estimator` k1, k2, k3"),
        ("`algorithm.use_kl_in_reward`", "`--objective.kl.place` reward"),
        ("`algorithm.kl_ctrl.kl_coef`", "`--objective.kl.coef` with `--objective.kl.place` reward"),
        ("`algorithm.kl_ctrl.type` adaptive, `algorithm.kl_ctrl.target_kl`", "`--objective.kl.target`"),
        ("`algorithm.kl_ctrl.horizon`", "`--objective.kl.horizon`, in batches"),
        ("`actor.entropy_coeff`", "`--objective.entropy.coef`"),
        ("`algorithm.filter_groups.enable`", "`--objective.shaping.dynamic-sampling`"),
        ("`algorithm.rollout_correction.rollout_is`", "`--objective.correction.level`, with action truncate"),
        ("`algorithm.rollout_correction.rollout_is_threshold`", "`--objective.correction.cap`, with action truncate"),
        (
            "`algorithm.rollout_correction.rollout_rs` geometric",
            "`--objective.correction.mask` k1 `--objective.correction.mask-over` mean, with its bounds",
        ),
        ("`algorithm.rollout_correction.rollout_token_veto_threshold`", "`--objective.correction.veto`"),
        ("`bypass_old_logprob_for_rollout`", "`--objective.correction.proximal` behaviour"),
        ("`rollout.over_sample_rate`", "`--oversample`, in groups"),
        ("`async_training.staleness_threshold` (a share of samples)", "`--eta`, in versions"),
        ("`model.enable_gradient_checkpointing`", "`--run.remat` full"),
        ("`model.enable_activation_offload`", "`--run.remat` offload"),
        ("`actor.fsdp_config.param_offload`, `actor.fsdp_config.optimizer_offload`", "`--optim.offload`"),
        ("`ref.fsdp_config.param_offload`", "`--offload-reference`"),
        ("`actor.strategy`, `actor.fsdp_config.fsdp_size`", "`--mesh.fsdp`, and the other axes of a mesh"),
        ("`model.lora_rank`", "`--lora.rank`"),
        ("`model.lora_alpha`", "`--lora.alpha`"),
        ("`model.target_modules`", "`--lora.targets`"),
        ("`actor.ulysses_sequence_parallel_size`", "`--mesh.cp` with `--run.cp` ulysses"),
        (
            "`rollout.tensor_model_parallel_size`, `rollout.gpu_memory_utilization`, `rollout.enforce_eager`",
            "options of the SGLang server (docs/launch.md)",
        ),
        (
            "`custom_reward_function.path`, `custom_reward_function.name`",
            "`--reward` file.py:name, which runs as it is",
        ),
        (
            "`reward_model.reward_manager`",
            "`--reward`; the length penalty of dapo: `--objective.shaping.overlong-buffer`",
        ),
        (
            "`reward_model.enable`, `reward_model.model.path`",
            "`--reward`: a reward function that asks the model (docs/preference.md)",
        ),
        ("`critic.model.path`", "`areax train ppo`, `--critic.model`"),
        ("`critic.cliprange_value`", "`--critic.objective.clip`"),
        ("`trainer.critic_warmup`", "`--critic.warmup`"),
        ("`trainer.total_epochs`", "`--steps` = epochs x prompts / `--groups`"),
        ("`trainer.total_training_steps`", "`--steps`"),
        ("`trainer.save_freq`", "`--save-every`"),
        ("`trainer.test_freq`", "`--evaluate-every`"),
        ("`trainer.val_before_train`", "="),
        ("`trainer.default_local_dir`", "`--out`"),
        ("`trainer.project_name`", "`--track.wandb`, `--track.trackio`, `--track.mlflow`, `--track.swanlab`"),
        ("`trainer.experiment_name`", "`--out`; wandb's run has its name"),
        ("`trainer.resume_mode`", "= (the same `--out` resumes)"),
        ("`trainer.max_actor_ckpt_to_keep`", "= (a run keeps its newest two states)"),
        ("`trainer.balance_batch`", "= (rows are packed)"),
        ("`trainer.logger`", TRACK),
        (
            "`trainer.n_gpus_per_node`, `trainer.nnodes`",
            "`--mesh.dp`, `--mesh.fsdp`, ...; `areax launch` for processes",
        ),
    ),
)
AREAL = Names(
    "AReaL",
    "`areal/api/cli_args.py`",
    (
        ("`train_dataset.path`", "`--data`"),
        ("`valid_dataset.path`", "`--heldout`"),
        ("`train_dataset.batch_size`, `rollout.consumer_batch_size`", "`--groups`"),
        ("`train_dataset.shuffle`", "`--curriculum.order` shuffled (the default)"),
        ("`tokenizer_path`", "= (the tokenizer of `--model`)"),
        ("`gconfig.n_samples`", "`--group-size`"),
        ("`gconfig.max_new_tokens`", "`--sampling.max-new-tokens`"),
        ("`gconfig.min_new_tokens`", "`--sampling.min-new-tokens`"),
        (
            "`gconfig.top_p`, `gconfig.top_k`, `gconfig.greedy`",
            "`--sampling.top-p`, `--sampling.top-k` with `--sampling.sampling-mask`; no greedy training",
        ),
        ("`gconfig.temperature`", "`--sampling.temperature`"),
        ("`rollout.max_head_offpolicyness`", "`--eta`"),
        ("`rollout.max_concurrent_rollouts`", "`--max-concurrent`, in groups"),
        ("`rollout.request_timeout`", "`--completion-timeout-s`"),
        ("`total_train_epochs`", "`--steps` = epochs x prompts / `--groups`"),
        ("`actor.path`", "`--model`"),
        ("`actor.ppo_n_minibatches`", "`--minibatches`"),
        ("`actor.eps_clip`", "`--objective.clip-low`; `--objective.clip-high` is a bound of its own"),
        ("`actor.eps_clip_higher`", "`--objective.clip-high`"),
        ("`actor.c_clip`", "`--objective.dual-clip`"),
        (
            "`actor.use_decoupled_loss`",
            "`--objective.correction.proximal` recompute (the default); without it: behaviour",
        ),
        ("`actor.recompute_logprob`", "`--objective.correction.proximal` recompute (the default)"),
        ("`actor.prox_logp_method` loglinear", "`--objective.correction.proximal` interpolate"),
        (
            "`actor.rejection_sampling`, `actor.behav_imp_weight_cap`",
            "`--objective.correction.cap`, with `--objective.correction.level`, `.action`, `.low`, `.mask`",
        ),
        ("`actor.importance_sampling_level`", "`--objective.ratio`"),
        ("`actor.optimizer.lr`", "`--optim.lr`"),
        ("`actor.optimizer.weight_decay`", "`--optim.weight-decay`"),
        ("`actor.optimizer.lr_scheduler_type`", "`--optim.schedule`"),
        ("`actor.optimizer.warmup_steps_proportion`", "`--optim.warmup`, in optimiser steps"),
        ("`actor.optimizer.gradient_clipping`", "`--optim.clip`"),
        ("`actor.use_lora`, `actor.lora_rank`", "`--lora.rank`"),
        ("`actor.enable_tree_training`", "`--trie` auto"),
        ("`actor.lora_alpha`", "`--lora.alpha`"),
        ("`actor.target_modules`", "`--lora.targets`"),
        ("`actor.mb_spec.max_tokens_per_mb`", "`--rows` x `--length` tokens, over all devices"),
        ("`actor.reward_norm.mean_level`", "`--objective.advantage.mean`"),
        ("`actor.reward_norm.std_level`", "`--objective.advantage.std`"),
        ("`actor.reward_norm.mean_leave1out`", "`--objective.advantage.leave-one-out`"),
        ("`actor.reward_norm.std_unbiased`", "`--objective.advantage.ddof` 1"),
        ("`actor.reward_norm.eps`", "`--objective.advantage.eps`"),
        (
            "`actor.adv_norm`, `actor.adv_norm.mean_level`, `actor.adv_norm.std_level`",
            "`--objective.advantage.whiten` token, over the batch as in AReaL's examples",
        ),
        ("`dynamic_bs`", "`--objective.shaping.dynamic-sampling`, which fills the batch up"),
        ("`rollout.agent.turn_discount`", "`--agent.discount`"),
        ("`rollout.agent.export_style` individual, concat", "`--agent.rows` interactions, leaves"),
        ("`total_train_steps`", "`--steps`"),
        ("`saver.freq_steps`", "`--save-every`"),
        ("`saver.freq_secs`, `recover.freq_secs`", "`--save-minutes`"),
        ("`evaluator.freq_steps`", "`--evaluate-every`"),
        ("`actor.m2_threshold`", "`areax train m2po`, `--objective.correction.second-moment`"),
        ("`actor.use_sapo_loss`", "`areax train sapo`"),
        ("`actor.use_cispo_loss`", "`areax train cispo`"),
        ("`actor.kl_ctl` (in the reward)", "`--objective.kl.coef` with `--objective.kl.place` reward"),
        ("`actor.kl_estimator`", "`--objective.kl.estimator`"),
        ("`actor.discount`", "`--objective.advantage.gamma`"),
        ("`actor.gae_lambda`", "`--objective.advantage.lam`"),
        ("`actor.reward_scaling`", "`--objective.shaping.scale`"),
        ("`actor.reward_bias`", "`--objective.shaping.bias`"),
        ("`actor.reward_clip`", "`--objective.shaping.low` and `--objective.shaping.high`"),
        ("`actor.overlong_tokens`", "`--objective.shaping.overlong-buffer`, the penalised tail"),
        (
            "`actor.overlong_reward_penalty`",
            "`--objective.shaping.overlong-tokens`, the longest completion, turns it on",
        ),
        ("`actor.overlong_penalty_factor`", "`--objective.shaping.overlong-penalty`"),
        ("`actor.gradient_checkpointing`", "`--run.remat`"),
        (
            "`actor.weight_update_mode` disk",
            "`--push.way` disk; over the network: stagers, or `--push.way` tensors",
        ),
        ("`eval_gconfig.n_samples`", "`--heldout-samples`"),
        ("`gconfig.stop_token_ids`", "`--sampling.stop-token-ids`"),
        ("`gconfig.stop`", "`--sampling.stop`"),
        ("`train_dataset.max_length`", "`--max-prompt`"),
        ("`actor.init_from_scratch`", "`--init` random"),
        ("`actor.dtype`", "`--run.dtype`; master weights stay fp32"),
        ("`actor.attn_impl`", "`--run.attention`"),
        ("`actor.optimizer.type`", "`--optim.name`"),
        ("`actor.optimizer.beta1`", "`--optim.b1`"),
        ("`actor.optimizer.beta2`", "`--optim.b2`"),
        ("`actor.optimizer.min_lr_ratio`", "`--optim.floor`"),
        ("`actor.sapo_tau_pos`, `actor.sapo_tau_neg`", "`--objective.tau-pos`, `--objective.tau-neg`"),
        ("`critic.path`", "`--critic.model`"),
        ("`critic.eps_clip`", "`--critic.objective.clip`"),
        ("`ref.path`", "none: the reference is the initial weights; `--reference-every` moves it"),
        ("`teacher.path`", "`--teacher`"),
        ("`experiment_name`, `trial_name`", "`--out`"),
        ("`recover.mode`", "= (the same `--out` resumes)"),
        ("`evaluator.eval_before_train`", "="),
        ("`perf_tracer.profile_steps`", "`--profile`"),
        ("`stats_logger.*`", TRACK),
        (
            "`cluster.n_nodes`, `cluster.n_gpus_per_node`",
            "`--mesh.dp`, `--mesh.fsdp`, ...; `areax launch` for processes",
        ),
        ("`cluster.fileroot`", "`--out`"),
        (
            "`allocation_mode`",
            "`--mesh.fsdp`, ... for training; `--servers`, `--serve.count` or `areax launch` for generation",
        ),
        ("`sglang.*`", "options of the SGLang server (docs/launch.md)"),
        (
            "`scheduler.type` local, ray, slurm",
            "`areax launch`: on this machine, on a Ray cluster, or a file for Slurm",
        ),
        ("`RolloutWorkflow.arun_episode`", "`--workflow`: runs as it is (docs/train-an-agent.md)"),
    ),
)
TINKER = Names(
    "Tinker",
    "`CLIConfig` of tinker-cookbook's recipes",
    (
        ("`model_name`", "`--model`"),
        ("`log_path`", "`--out`"),
        ("`groups_per_batch`", "`--groups`"),
        ("`max_tokens`", "`--sampling.max-new-tokens`"),
        ("`lora_rank`", "`--lora.rank`; 0 trains all weights"),
        ("`kl_penalty_coef`", "`--objective.kl.coef` with `--objective.kl.place` reward"),
        ("`num_substeps`", "`--minibatches`"),
        ("`max_steps_off_policy`", "`--eta`"),
        ("`loss_fn` importance_sampling, ppo, cispo", "`areax train reinforce`, `grpo`, `cispo`"),
        ("`eval_every`", "`--evaluate-every`"),
        ("`renderer_name`", "none: the tokenizer's chat template; `--chat-template-kwargs` gives it variables"),
        ("`load_checkpoint_path`", "`--model`, a Hugging Face directory; the same `--out` resumes a run"),
        ("`env`, `dataset_builder`", "`--data` with `--reward`, or `--workflow`"),
        ("`wandb_project`", "`--track.wandb`"),
    ),
)
LIBRARIES = (TRL_GRPO, TRL_OFFLINE, TRAINER, VERL, AREAL, TINKER)
QUOTED = re.compile(r"`([^`]+)`")


def hint(name: str, known: Collection[str]) -> str | None:
    """What to use here instead of another library's option, such as "TRL's beta is here: --objective.kl.coef".

    Args:
      name: as it was given, without dashes in front; leading parts of a dotted name may be missing, or be too many.
      known: the options of the command; rows that name others are passed over.
    """
    parts = name.replace("-", "_").split(".")
    rows = [(library.library, *row) for library in LIBRARIES for row in library.rows if _usable(row[1], known)]
    for wanted in (".".join(parts[i:]) for i in range(len(parts))):
        if ALIASES.get(wanted.replace("_", "-")) in known:
            return f"use --{ALIASES[wanted.replace('_', '-')]}"
        for means in (_is, _ends_in):
            for library, theirs, here in rows:
                if any(means(word, wanted) for word in QUOTED.findall(theirs)):
                    option, text = f"{library}'s {wanted}", here.replace("`", "")
                    if text[0] == "=":
                        return f"{option} needs no option here{text[1:]}"
                    return (
                        f"{option} has no option here{text[4:]}" if text[:4] == "none" else f"{option} is here: {text}"
                    )
    return None


def renamed(name: str, known: Collection[str]) -> str:
    """An option's name here, of one that may be an alias; both without dashes in front."""
    dashed = name.replace("_", "-")
    target = ALIASES.get(dashed)
    return target if target and target in known and dashed not in known else name


def _is(word: str, wanted: str) -> bool:
    return wanted.startswith(word[:-1]) if word.endswith("*") else word == wanted


def _ends_in(word: str, wanted: str) -> bool:
    return "_" in wanted and word.rpartition(".")[2] == wanted  # only names of several words tell what is meant


def _usable(here: str, known: Collection[str]) -> bool:
    named = re.findall(r"--([a-z][\w.-]*\w)", here)
    return all(option in known for option in named)
