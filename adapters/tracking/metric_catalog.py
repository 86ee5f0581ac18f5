"""Catalogue of metrics: a one-line meaning for each, healthy ranges, and the report's charts.

A metric `x`, a mean, may come with its maximum `x_max` and histogram `x_hist`; `heldout_x` is the same over held-out
rows. `time_<phase>` are seconds of a step's phases; `time_step` is the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart of the `names` that a run logged; log, zero and y_range are arguments of `charts.curves`."""

    group: str
    title: str
    names: tuple[str, ...]
    meaning: str
    log: bool = False
    zero: bool = False
    y_range: tuple[float, float] | None = None
    unless: str = ""  # not drawn if this metric, which shows the same, was logged


GROUPS = {
    "Learning": "Does the policy improve, and how do its answers change?",
    "Agreement": "Does the trainer assign sampled tokens the same probability as the sampler?",
    "Optimiser": "How large and how stable are the updates?",
    "Experts": "Are the experts used evenly?",
    "Asynchrony": "How stale is the training data?",
    "Speed": "How much work per second?",
    "Another objective": "What would other options have made of the same samples at the same weights (areax replay)?",
    "Other": "Further metrics, and what the recipe logs beyond those of areax.",
}

CHARTS = (
    Chart(
        "Learning", "Held-out accuracy", ("accuracy", "accuracy_sampled"),
        "Fraction of held-out problems answered correctly.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Reward", ("reward",),
        "Mean reward of the samples trained on in this step. It should rise.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Reward spread", ("reward_std",),
        "Standard deviation of the reward over the samples of a step. 0 = nothing to learn from.", zero=True,
    ),
    Chart(
        "Learning", "Likelihood loss", ("nll", "heldout_nll"),
        "Mean negative log-likelihood of the target tokens, in nats per token. Lower is better.", zero=True,
    ),
    Chart(
        "Learning", "Preferences", ("preference_accuracy", "heldout_preference_accuracy"),
        "Fraction of pairs in which the chosen completion scores higher than the rejected one.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Chosen and rejected", ("reward_chosen", "reward_rejected", "margin"),
        "Scores of both sides, beta log(policy / reference) or the reward model's score, and their difference.",
    ),
    Chart(
        "Learning", "Steps judged", ("step_accuracy", "heldout_step_accuracy"),
        "Fraction of labelled steps whose label is the likeliest.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Divergence", ("divergence", "heldout_divergence"),
        "Divergence of the student from its teacher, nats per token. It should fall.", zero=True,
    ),
    Chart(
        "Learning", "Entropy", ("entropy", "heldout_entropy"),
        "Entropy in nats per token: 0 = always the same answer. A rapid fall means exploration ends.",
        zero=True,
    ),
    Chart(
        "Learning", "Observations", ("observation_nll",),
        "Negative log-likelihood of what the environment answered, nats per token. It should fall.", zero=True,
    ),
    Chart(
        "Learning", "Draft loss", ("mtp_loss",),
        "Cross entropy of drafts by multi-token prediction, nats per token. It should follow the policy.", zero=True,
    ),
    Chart(
        "Learning", "Draft accuracy", ("mtp_accuracy",),
        "Fraction of learnt tokens that are the likeliest by multi-token prediction.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Answer length", ("length", "length_max"),
        "Sampled tokens per answer: the mean and the maximum of the step.", zero=True,
    ),
    Chart(
        "Learning", "Truncated answers", ("truncated",),
        "Fraction of answers that hit the length limit.", zero=True,
    ),
    Chart(
        "Learning", "Groups without signal", ("solved_all", "solved_none"),
        "Fraction of prompts whose answers all got the best, or all the worst, reward: no advantage, no gradient.",
        y_range=(0, 1),
    ),
    Chart(
        "Agreement", "Mismatch (k3)", ("mismatch_k3",),
        "Mean of r - 1 - log r, r = trainer / sampler probability. 0 = they agree; staleness adds to it.",
        log=True,
    ),
    Chart(
        "Agreement", "Log-probability difference", ("max_logp_diff",),
        "|trainer - sampler| in nats, for tokens of the current version: only numerical differences.",
        log=True,
    ),
    Chart(
        "Agreement", "Mismatch (k3), current version", ("mismatch_k3_now",),
        "The same only for tokens of the current version: only numerical differences.", log=True,
    ),
    Chart(
        "Agreement", "Canaries", ("canary_diff", "canary_cache_diff"),
        "Differences of fixed prompts' log-probabilities: servers from the trainer, with prefix cache from without.",
        log=True,
    ),
    Chart(
        "Speed", "Weight push", ("push_s", "push_stage_s", "push_pause_s", "push_load_s"),
        "Seconds of a push, in total and to: stage weights at the servers, pause generation, load.",
        zero=True,
    ),
    Chart(
        "Speed", "Bytes per push", ("push_bytes", "push_stage_bytes"),
        "Size of the version, and bytes fetched by all stagers together.", zero=True,
    ),
    Chart(
        "Speed", "Evaluation", ("evaluate_s",), "Seconds of an evaluation, concurrent with the step.", zero=True,
    ),
    Chart(
        "Agreement", "Importance weight", ("importance_weight", "importance_weight_max"),
        "Trainer / sampler probability of a token. The mean stays near 1 while samples are fresh.",
    ),
    Chart(
        "Agreement", "Dropped tokens", ("dropped_fraction",),
        "Fraction of tokens dropped by the off-policy correction, by bounds or masks.", zero=True,
    ),
    Chart(
        "Agreement", "Unusable tokens", ("unusable_fraction",),
        "Fraction of sampled tokens excluded because the sampler's or the reference's log-probability was not finite. "
        "Anything above 0 indicates a bug there.", zero=True,
    ),
    Chart(
        "Agreement", "KL to the reference", ("kl",),
        "Divergence of the policy from the reference model, in nats per token.", zero=True,
    ),
    Chart(
        "Optimiser", "Gradient norm", ("grad_norm",),
        "Norm of the gradient before clipping. Spikes indicate an unusual batch; nan or inf skips the update.",
        log=True, zero=True,
    ),
    Chart(
        "Optimiser", "Clipped tokens", ("clip_fraction",),
        "Fraction of tokens whose ratio is outside the clip range and that get no gradient.",
        zero=True,
    ),
    Chart(
        "Optimiser", "Policy ratio", ("ratio", "ratio_max"),
        "New / proximal probability of a token. Exactly 1 at the first update on a batch.",
    ),
    Chart(
        "Optimiser", "Objective", ("loss",),
        "The loss of the update: a surrogate, whose gradient matters and whose value says little.",
        unless="nll",
    ),
    Chart(
        "Optimiser", "Skipped updates", ("skipped",),
        "1 if an update was skipped because its gradient was not finite.", zero=True,
    ),
    Chart(
        "Optimiser", "Learning rate", ("learning_rate",), "Learning rate of the optimiser.", zero=True
    ),
    Chart(
        "Optimiser", "Advantage", ("advantage",),
        "Mean |advantage| of a token. 0 = nothing left to learn.", zero=True,
    ),
    Chart(
        "Learning", "Entropy percentiles", ("entropy_p10", "entropy_p90"),
        "10th and 90th percentile of the tokens' entropy, in nats.", zero=True,
    ),
    Chart(
        "Learning", "Entropy by advantage", ("entropy_positive", "entropy_negative"),
        "Entropy, in nats, of tokens with positive and with negative advantage.", zero=True,
    ),
    Chart(
        "Learning", "Solved at least once", ("solved_any",),
        "Fraction of prompts for which some answer got a reward (pass@k).", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Degenerate answers", ("repetition", "empty", "aborted", "unscorable"),
        "Fraction that is repeated, empty, aborted, or could not be scored.", zero=True,
    ),
    Chart(
        "Learning", "Length and reward", ("length_reward_correlation",),
        "Correlation over the answers of a step. A drift indicates that length itself is rewarded.", y_range=(-1, 1),
    ),
    Chart(
        "Agreement", "Probability error", ("prob_error",),
        "Mean of exp |trainer - sampler log-probability|. 1 = they agree; above 1.05 look for a bug.",
    ),
    Chart(
        "Agreement", "Probability correlation", ("prob_pearson",),
        "Correlation of trainer and sampler probabilities of sampled tokens. Below 0.99 look for a bug.",
    ),
    Chart(
        "Agreement", "Effective sample size", ("ess",),
        "(sum w)^2 / (n sum w^2) of the importance weights: 1 = equal weights.", y_range=(0, 1),
    ),
    Chart(
        "Agreement", "Perplexity ratio", ("perplexity_ratio",),
        "exp of the mean log (trainer / sampler). 1 = they agree on average.",
    ),
    Chart(
        "Optimiser", "Relative update", ("update_ratio", "critic_update_ratio"),
        "Norm of the update over that of the weights.", log=True,
    ),
    Chart(
        "Optimiser", "Critic", ("explained_variance",),
        "Fraction of the returns' variance explained by the critic. Below 0 it does harm.",
    ),
    Chart(
        "Optimiser", "Value error", ("value_error", "critic_loss"),
        "Squared error of the critic, in squared units of reward.", zero=True,
    ),
    Chart(
        "Experts", "Load", ("expert_load", "expert_load_max"),
        "Load of a layer's most used expert over the mean load, 1 = balanced: the mean over layers, and the worst one.",
        zero=True,
    ),
    Chart(
        "Experts", "Idle experts", ("expert_idle", "expert_idle_max"),
        "Fraction of a layer's experts that no token of the step chose: the mean over layers, and the worst layer.",
        zero=True,
    ),
    Chart(
        "Experts", "Balance loss", ("balance_load",),
        "E sum f P, without its coefficient; top_k if all experts are used equally.", zero=True,
    ),
    Chart(
        "Experts", "Router logits", ("balance_z",),
        "Mean squared log-sum-exp of the router's logits, without its coefficient. Growth means overconfidence.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Policy version", ("version", "server_version"),
        "Batches consumed so far; the server's version should follow immediately.",
    ),
    Chart(
        "Asynchrony", "Staleness", ("staleness", "staleness_max"),
        "Batches between the version that sampled a token and the one trained on it.", zero=True,
    ),
    Chart(
        "Asynchrony", "Length bias", ("length_bias",),
        "Relative difference in length of answers trained on and answers started. Below 0: long ones are missing.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Staleness of groups", ("group_staleness", "group_staleness_max"),
        "Batches between a group's admission and the batch that contains it. Never above eta.", zero=True,
    ),
    Chart(
        "Asynchrony", "Idle and busy", ("trainer_idle", "server_busy"),
        "Fraction of a step in which the trainer was idle, and of the servers' time in which they were busy.",
        y_range=(0, 1),
    ),
    Chart(
        "Asynchrony", "Requests in flight", ("requests_in_flight",),
        "Mean number of requests at all servers together.", zero=True,
    ),
    Chart(
        "Asynchrony", "Slot load", ("slot_load",),
        "Requests in flight over the servers' slots: above 1 some waited at the server.", zero=True,
    ),
    Chart(
        "Asynchrony", "Queue times", ("group_wait_s", "group_wait_s_max", "request_wait_s", "request_wait_s_max"),
        "Seconds that finished groups waited for their batch, and requests for a free server.", zero=True,
    ),
    Chart(
        "Asynchrony", "Left out", ("rejected", "refused", "failed", "stopped", "too_long", "out_of_time"),
        "Groups without samples, rejected by the filter, lost to server failures, or surplus; rows too long; answers "
        "out of time.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Retries", ("retries", "lost", "request_retries", "reward_retries"),
        "Episodes, requests and rewards of the step that were retried, and episodes lost.", zero=True,
    ),
    Chart(
        "Speed", "Tokens per second", ("tokens_per_second", "rollout_tokens_per_second"),
        "Tokens trained on, and tokens generated, per second of wall time.", zero=True,
    ),
    Chart(
        "Speed", "Tokens per step", ("tokens", "generated_tokens", "learnt_tokens"),
        "Tokens of the batch, prompts included, and of completions finished during the step.", zero=True,
    ),
    Chart(
        "Speed", "Shared and filled", ("trie_ratio", "filled"),
        "Tokens computed over those of the samples, with --trie auto: 1 = none are shared. Positions computed that "
        "hold a token.", y_range=(0, 1),
    ),
    Chart(
        "Another objective", "Cosines", ("gradient_cosine", "update_cosine"),
        "Of the gradients of both at the step's weights, and of what both change in the step. 1 = the same direction.",
        y_range=(-1, 1),
    ),
    Chart(
        "Another objective", "Gradient norms", ("own_gradient_norm", "other_gradient_norm"),
        "Norms of both gradients, before clipping.", log=True,
    ),
    Chart(
        "Another objective", "Update norms", ("own_update_norm", "other_update_norm"),
        "Norms of what both change in the weights in a step.", log=True,
    ),
    Chart(
        "Another objective", "Effective sample sizes", ("own_ess", "other_ess"),
        "(sum w)^2 / (n sum w^2) of the importance weights of both: 1 = equal weights.", y_range=(0, 1),
    ),
    Chart(
        "Another objective", "Samples that teach", ("own_effective_fraction", "other_effective_fraction"),
        "Fraction of samples with a learnt token of nonzero advantage and weight, for both.", y_range=(0, 1),
    ),
    Chart(
        "Another objective", "Clipped tokens of both", ("own_clip_fraction", "other_clip_fraction"),
        "Fraction of tokens outside the clip range of each, which get no gradient.", zero=True,
    ),
    Chart(
        "Another objective", "KL of both", ("own_kl", "other_kl"),
        "Divergence of the policy from each one's reference, in nats per token.", zero=True,
    ),
    Chart(
        "Speed", "Batch size", ("groups", "samples", "effective_samples", "rows"),
        "Prompt groups and samples of a step, samples with a gradient, or problems of an evaluation.",
        zero=True,
    ),
)  # fmt: skip

METRICS = {
    "aborted": "fraction of answers that ended with a server error or abort",
    "accuracy": "mean reward of held-out problems: greedy, or over all completions of each (avg@n)",
    "accuracy_sampled": "the same with answers sampled at the training temperature",
    "advantage": "mean |advantage| of a token: the distance of a reward from its baseline",
    "balance_load": "load-balancing loss E sum f P of a layer, without its coefficient; top_k = experts used equally",
    "balance_z": "squared log-sum-exp of a router's logits, without its coefficient",
    "bounded_fraction": "fraction of tokens whose importance weight was out of bounds and clipped or masked",
    "canary_cache_diff": "mean difference of a server's log-probabilities with its prefix cache and without, nats",
    "canary_diff": "mean difference of a server's log-probabilities of the canaries' prompts from the trainer's, nats",
    "canary_drifts": "canaries of the step that found a server computing otherwise than the trainer",
    "chi2_sequence": "mean squared importance weight of whole sequences, minus 1; grows with staleness",
    "chi2_token": "mean squared importance weight of a token, minus 1; grows with staleness",
    "clip_fraction": "fraction of tokens outside the clip range, which get no gradient",
    "clip_high_fraction": "fraction of tokens that have positive advantage and are clipped",
    "clip_low_fraction": "fraction of tokens that have negative advantage and are clipped",
    "compared_fraction": "fraction of learnt tokens that are one token for a teacher with another tokenizer, too",
    "critic_grad_norm": "norm of the critic's gradient, before clipping",
    "critic_loss": "the critic's loss: half the squared error of values, clipped",
    "critic_skipped": "1 if the critic's update was skipped because its gradient was not finite",
    "critic_update_ratio": "norm of the critic's update over that of its weights",
    "divergence": "divergence of the student's next-token distribution from the teacher's, nats",
    "dropped_fraction": "fraction of tokens dropped by the off-policy correction, by bounds or masks; no gradient",
    "dropped_sequences": "fraction of sequences with all tokens dropped by the off-policy correction",
    "dual_clip_fraction": "fraction of tokens with negative advantage whose gain is bounded by the dual clip",
    "effective_fraction": "fraction of samples with a learnt token of nonzero advantage and weight",
    "effective_samples": "samples with a learnt token of nonzero advantage and weight",
    "empty": "fraction of answers with no token but the end",
    "entropy": "entropy of the next token, nats; 0 = certain",
    "entropy_negative": "the same over tokens with negative advantage",
    "entropy_p10": "10th percentile of the tokens' entropy, nats",
    "entropy_p90": "90th percentile of the tokens' entropy, nats",
    "entropy_positive": "the same over tokens with positive advantage",
    "equal": "1 if a recomputed step is the run's, bit for bit",
    "ess": "effective sample size: (sum w)^2 / (n sum w^2) of the importance weights; 1 = equal weights",
    "evaluate_s": "seconds of an evaluation, concurrent with the step",
    "expert_idle": "fraction of a layer's experts that no token chose",
    "expert_load": "load of a layer's most used expert over the mean load; 1 = balanced",
    "explained_variance": "fraction of the returns' variance explained by the critic's values",
    "failed": "groups of the step that were dropped because their servers failed",
    "fleet_healthy": "servers that accept requests",
    "fleet_in_flight": "requests at all servers together",
    "fleet_servers": "servers of the fleet, in any state",
    "filled": "fraction of the computed positions that hold a token",
    "generated_tokens": "tokens of completions finished during the step, evaluations included",
    "grad_norm": "norm of the gradient over all parameters, before clipping",
    "gradient_cosine": "cosine of the gradients of the run's own and of other options, at the same weights",
    "group_staleness": "version of the batch minus that at which the group was admitted",
    "group_wait_s": "seconds that a finished group waited for its batch",
    "groups": "prompt groups in the batch",
    "groups_that_teach": "prompt groups whose rewards differ",
    "image_tokens_sampled": "sampled tokens that equal the one for images: text to the model, and not learnt",
    "images": "images of the batch's samples; one that several have counts several times",
    "importance_weight": "proximal / sampling probability of a token; 1 = fresh and in agreement",
    "kl": "estimated KL divergence from the reference model, nats per token",
    "kl_baseline": "KTO's estimate of the divergence from the reference, nats per completion",
    "kl_coef": "coefficient of the KL penalty, if adaptive",
    "kl_k1": "mean log (policy / reference) of a token, nats: unbiased, noisy",
    "kl_k3": "r - 1 - log r, r = reference / policy: unbiased, never negative",
    "learning_rate": "learning rate of the optimiser",
    "learnt_tokens": "tokens of the step that the loss counts",
    "left_out": "fraction of sequences left out: no partner, no learnt tokens, or a reference that is not finite",
    "length": "sampled tokens per answer",
    "length_begun": "tokens per answer over recently started groups, with estimates for stopped and running ones",
    "length_bias": "relative difference of trained answers' length and length_begun; below 0: long ones are missing",
    "length_p50": "median of sampled tokens per answer",
    "length_p90": "90th percentile of sampled tokens per answer",
    "length_reward_correlation": "correlation of an answer's length and reward; a drift indicates a length bias",
    "limit": "lowest limit of concurrent requests among the servers",
    "logp_chosen": "log-probability of a chosen completion, nats",
    "logp_diff": "|trainer - sampler| log-probability of a token before the update, staleness included, nats",
    "logp_rejected": "log-probability of a rejected completion, nats",
    "loss": "the loss that the update minimises",
    "lost": "episodes of the step lost to server failures, without which their groups continue",
    "margin": "score of a pair's chosen completion minus that of the rejected one",
    "max_logp_diff": "largest |trainer - sampler| log-probability of a token of the current version, nats",
    "mismatch_k3": "mean of r - 1 - log r, r = trainer / sampler probability; 0 = equal",
    "mismatch_k3_now": "the same only over tokens of the current version: only numerical differences",
    "mtp_accuracy": "1 if a learnt token is the likeliest by multi-token prediction, else 0",
    "mtp_loss": "cross entropy of a draft by multi-token prediction, nats",
    "nll": "negative log-likelihood of a target token, nats",
    "observation_nll": "negative log-likelihood of a token that the environment answered, nats",
    "other_clip_fraction": "fraction of tokens outside the clip range of the other options",
    "other_effective_fraction": "fraction of samples that teach by the other options",
    "other_ess": "effective sample size of the other options; 1 = equal weights",
    "other_gradient_norm": "norm of the gradient of the other options, before clipping",
    "other_kl": "estimated KL divergence from the reference of the other options, nats per token",
    "other_update_norm": "norm of what the other options change in the weights in a step",
    "out_of_time": "answers of the step that ended because their episode's time was over",
    "own_clip_fraction": "fraction of tokens outside the clip range of the run's own options",
    "own_effective_fraction": "fraction of samples that teach by the run's own options",
    "own_ess": "effective sample size of the run's own options; 1 = equal weights",
    "own_gradient_norm": "norm of the gradient of the run's own options, before clipping",
    "own_kl": "estimated KL divergence from the reference of the run's own options, nats per token",
    "own_update_norm": "norm of what the run's own options change in the weights in a step",
    "partial": "fraction of answers with tokens of several versions (partial rollouts)",
    "perplexity_ratio": "exp of the mean log (trainer / sampler) of a token",
    "ppo_kl": "mean log (proximal / new policy) of a token: exactly 0 at the first update on a batch",
    "preference": "the loss on a pair's two scores, without its coefficient",
    "preference_accuracy": "fraction of pairs in which the chosen completion scores higher",
    "prob_diff": "|trainer - sampler| probability of a token before the update",
    "prob_error": "mean of exp |trainer - sampler log-probability|: 1 = they agree",
    "prob_pearson": "correlation of the trainer's and the sampler's probabilities of tokens",
    "push_bytes": "bytes of the pushed version's tensors",
    "push_load_s": "seconds that the slowest server took to load new weights",
    "push_pause_s": "seconds that generation was paused for new weights, on the slowest server",
    "push_probe_diff": "mean difference of a server's log-probabilities on the probe prompt, nats per token",
    "push_prove_s": "seconds after a push until the servers' weights were verified",
    "push_s": "seconds of a weight push, writing included, concurrent with the step",
    "push_stage_bytes": "bytes fetched for a push by all stagers together",
    "push_stage_s": "seconds until the slowest server could read the new weights",
    "push_total_s": "seconds of a weight push, without writing",
    "ratio": "new / proximal probability of a token; 1 before the first update on a batch",
    "ratio_min": "smallest new / proximal probability of a token",
    "refused": "groups of the step that were generated but filtered out, such as those with equal rewards",
    "rejected": "groups of the step for which the workflow returned no sample",
    "repetition": "fraction of 4-grams that occurred earlier in the same answer",
    "request_retries": "requests of the step that were retried: server busy, failed or taken out of rotation",
    "request_wait_s": "seconds that a request waited for a free server",
    "requests_in_flight": "mean number of requests at all servers together",
    "rest_s": "seconds until servers had released their memory to the trainer",
    "retries": "episodes of the step that were rerun because a server failed",
    "return": "the critic's target: advantage + value of a token",
    "reward": "reward of the samples of the step",
    "reward_chosen": "score of the chosen completion: beta log(policy / reference), or a reward model's",
    "reward_retries": "rewards of the step that were recomputed because they raised, hung or crashed",
    "reward_rejected": "score of the rejected completion",
    "reward_shift": "BCO's delta: mean reward of desirable and of undesirable completions, averaged",
    "reward_std": "standard deviation of the reward over the samples of the step",
    "rollout_tokens_per_second": "tokens generated per second of wall time, evaluations included",
    "rows": "problems in the evaluation",
    "scored_rows": "problems with a scored completion, of which the accuracy is the mean",
    "sampler_mass": "probability that the sampler gave to the likeliest tokens that it reported",
    "samples": "samples in the batch",
    "score": "a reward model's score, of both completions",
    "seconds": "seconds of the run so far, without the time between two processes",
    "server_busy": "fraction of the servers' time in which they had at least one request of this run",
    "server_version": "policy version reported by the server",
    "skipped": "1 if the update was skipped because its gradient was not finite",
    "slot_load": "requests in flight over the servers' slots",
    "solved_all": "fraction of prompts for which every answer got the best reward",
    "solved_any": "fraction of prompts for which some answer got a reward: pass@k with k = group size",
    "solved_none": "fraction of prompts for which no answer got a reward",
    "staleness": "trainer's version minus the version that sampled a token, in batches",
    "staleness_span": "largest difference of versions within one answer",
    "step": "latest logged step",
    "step_accuracy": "fraction of labelled steps whose label a process reward model finds the likeliest",
    "step_nll": "negative log-probability of the label of a step, nats",
    "stopped": "surplus groups of the step, stopped to be rerun (oversampling)",
    "tokens": "tokens of the samples of the step, prompts included",
    "tokens_per_second": "tokens of the samples of the step per second of wall time",
    "too_long": "rows of the step left out because they do not fit a packed row",
    "trainer_idle": "fraction of the step without an update, save or host copy",
    "trie_ratio": "tokens computed over those of the samples, with --trie auto; 1 = none are shared",
    "truncated": "fraction of answers truncated at the length limit",
    "unaligned_fraction": "fraction of learnt tokens in no span of two tokenizers, not compared with the teacher",
    "unscorable": "fraction of answers without a reward, excluded from training",
    "unstopped": "fraction of answers truncated at the length limit that go on past a token that ends a turn",
    "unusable_fraction": "fraction of sampled tokens with a log-probability that is not finite, excluded from training",
    "unusable_teacher": "fraction of tokens where the teacher's numbers are not finite, excluded from distillation",
    "update_cosine": "cosine of what the run's own and other options change in the weights in a step",
    "update_ratio": "norm of the update over that of the weights",
    "value": "the critic's value at a token, in units of reward",
    "value_clip_fraction": "fraction of tokens whose value is clipped in the critic's loss",
    "value_error": "squared error of the critic's value at a token",
    "version": "policy version: batches consumed so far",
}

# Counts per line, which add up over the steps.
COUNTED = {
    "failed", "generated_tokens", "out_of_time", "push_bytes", "push_stage_bytes", "refused", "rejected",
    "request_retries", "retries", "reward_retries", "samples", "skipped", "tokens", "too_long",
}  # fmt: skip

# Values below or above these bounds raise an alarm, after as many steps as `diagnosis.CONDITIONS` says. Bounds on
# agreement are other systems' release criteria: prob_error and prob_pearson of NeMo RL and verl, logp_diff of slime,
# mismatch_k3_now of prime-rl.
ALARMS = {
    "aborted": (None, 0.05),
    "bounded_fraction": (None, 0.1),
    "canary_drifts": (None, 0),
    "clip_fraction": (None, 0.2),
    "critic_skipped": (None, 0),
    "dropped_fraction": (None, 0.2),
    "dropped_sequences": (None, 0.2),
    "empty": (None, 0.05),
    "entropy": (0.01, None),
    "ess": (0.5, None),
    "explained_variance": (0, None),
    "filled": (0.7, None),
    "logp_diff": (None, 0.1),
    "mismatch_k3_now": (None, 0.001),
    "perplexity_ratio": (0.9, 1.1),
    "prob_error": (None, 1.05),
    "prob_pearson": (0.99, None),
    "ratio": (0.9, 1.1),
    "repetition": (None, 0.3),
    "skipped": (None, 0),
    "truncated": (None, 0.5),
    "unscorable": (None, 0.05),
    "unstopped": (None, 0),
    "unusable_fraction": (None, 0),
}

PHASES = {
    "rollout": ("waiting for rollout", "the trainer is idle until a batch is complete"),
    "wait": ("waiting for servers", "the last push or an evaluation has not finished"),
    "pack": ("packing", "samples are packed into rows"),
    "score": ("scoring", "log-probabilities of the batch under the current weights"),
    "update": ("update", "forward, backward and optimiser"),
    "publish": ("copying weights", "new weights are copied to the host, to be pushed during the next step"),
    "save": ("saving", "checkpoint of parameters, optimiser and data position"),
    "evaluate": ("evaluation", "held-out problems are answered and scored"),
    "other": ("the rest", "not covered by the phases above"),
}

SUMMARY = {
    "sft_accuracy": "held-out accuracy after SFT, before RL",
    "base_accuracy": "held-out accuracy of the model that RL started from",
    "rl_accuracy": "held-out accuracy at the end",
    "sft_accuracy_sampled": "the same after SFT, answers sampled at temperature 1",
    "rl_accuracy_sampled": "the same at the end, answers sampled at temperature 1",
    "evaluation": "all metrics of the last evaluation",
    "heldout_rows": "held-out problems over which accuracies are computed",
    "sft_steps": "SFT updates",
    "steps": "updates of this run",
    "complete": "whether all steps were trained, and the last version pushed, evaluated and exported",
    "accuracies": "held-out accuracy by version",
    "stopped_on": "the --stop-on rule that ended the run, and why",
    "trouble": "whether an alarm, or a metric that is not a number, ended it (exit code 3)",
    "alarms": "alarms of the steps, with what happened, how often and when",
    "rl_steps": "batches consumed by RL",
    "version": "policy version at the end",
    "server_version": "policy version reported by the server at the end; must equal the trainer's",
    "max_logp_diff": "largest |trainer - sampler| log-probability of a token of the current version, nats",
    "mismatch_k3": "mean of r - 1 - log r, r = trainer / sampler probability, over those tokens",
    "seconds": "wall time of the whole run",
    "checkpoint": "the trained model, a Hugging Face directory",
    "gguf": "the trained model as a file for llama.cpp and others",
    "exports": "hash of each export's manifest.json, by which a complete run knows its own",
    "report": "this page",
    "eta": "maximum staleness of a sample in training, in batches",
    "seed": "seed of all randomness",
    "time": "seconds of the whole run by phase",
    "counts": "events of the whole run",
    "publish_s": "copying new weights to the host",
    "save_s": "saving states",
    "wait_s": "waiting for the last push or evaluation",
    "rollout_s": "waiting for completions",
    "update_s": "forward, backward and optimiser",
    "push_s": "pushing weights, concurrent with the rest",
    "evaluate_s": "evaluating, concurrent with the rest",
    "step_s": "all steps",
    "accepted": "groups trained on, or ready to be",
    "running": "groups being generated at the end",
    "rejected": "groups for which the workflow returned no sample",
    "refused": "groups that were filtered out, such as those with equal rewards",
    "failed": "groups that were dropped because their servers failed",
    "stopped": "surplus groups, stopped to be rerun (oversampling)",
    "dropped": "groups in flight at the end, which run first when the run resumes",
    "retries": "episodes that were rerun because a server failed",
    "lost": "episodes lost to server failures",
    "requests": "requests to servers",
    "reads": "texts scored by servers",
    "tokens": "tokens generated",
    "resumed": "completions that were continued after an abort",
    "busy": "requests that a server refused for want of room",
    "preempted": "completions that a server recomputed in part",
    "recalled": "generated tokens that the journal of a former process had",
    "lowered": "times that a server's concurrency limit was lowered",
    "broken": "requests that broke off",
    "rerouted": "requests whose server was taken out of traffic",
    "drifted": "servers that a canary found computing otherwise than the trainer",
    "strange": "completions sampled with weights that the server was not given",
    "recovered": "servers that recovered",
    "restarted": "servers that were restarted",
    "joined": "servers that joined the run",
    "left": "servers that left the run",
    "undone": "pushes that were undone",
    "scored": "rewards that were computed",
    "raised": "rewards that raised an error",
    "late": "rewards that took too long",
    "died": "rewards that killed their worker",
    "retried": "rewards that were computed again",
    "recycled": "reward workers that were replaced because of their age or memory",
}


EVALUATED = {  # entries of an evaluation that mean something else than a step's metric of this name
    "stderr": "standard error of the accuracy, from the spread over rows",
    "samples": "completions of all problems",
    "unscorable": "completions without a reward, which are left out",
}
OF_SOURCE = {  # metrics of one source of a mixture
    "share": "share of the batch's prompts or rows",
    "reward": "mean reward of its completions",
    "solved_any": "share of its prompts with a reward above 0",
}
UNKNOWN = "logged by the recipe under this name"
ENDINGS = {
    "_max": ", largest",
    "_s": " (s)",
    "_p10": ", 10th percentile",
    "_p50": ", median",
    "_p90": ", 90th percentile",
}


def label(name: str) -> str:
    """`grad_norm_max` -> `grad norm, largest`."""
    for ending, words in ENDINGS.items():
        if name.endswith(ending):
            return label(name.removesuffix(ending)) + words
    return name.replace("_", " ")


def meaning(name: str) -> str:
    """One-line meaning of a metric."""
    if name in METRICS:
        return METRICS[name]
    base = name.removesuffix("_max")
    if base in METRICS and base != name:
        return f"largest single value of: {METRICS[base]}"
    if name.startswith("reward_"):
        return f"mean of the reward component {name.removeprefix('reward_')}"
    if name.startswith("fleet_"):
        return f"total of the fleet so far: {label(name.removeprefix('fleet_').removesuffix('_total'))}"
    if name.startswith("heldout_"):
        return f"over held-out rows: {meaning(name.removeprefix('heldout_'))}"
    if "/" in name:
        held, _, rest = name.partition("/")
        if rest in OF_SOURCE:
            return f"of the source {held} of --data: {OF_SOURCE[rest]}"
        return f"of the held-out set {held}: {EVALUATED.get(rest) or meaning(rest)}"
    if name.startswith("pass@"):
        return f"share of held-out problems that one of {name[5:]} completions solves: expected best reward, unbiased"
    if name == "time_step":
        return "seconds of the whole step"
    phase = name.removeprefix("time_")
    if phase != name:
        return f"seconds: {PHASES[phase][1]}" if phase in PHASES else f"seconds spent on {label(phase)}"
    return UNKNOWN


def healthy(name: str) -> str:
    """The healthy range by `ALARMS`, "from 0.9 to 1.1", or ""."""
    below, above = ALARMS.get(name, (None, None))
    bounds = ("from", below), ("to", above)
    return " ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def result(path: Sequence[str]) -> str:
    """One-line meaning of an entry of the summary, by the names that lead to it: ("counts", "rewards", "late")."""
    evaluated = EVALUATED.get(path[-1]) if path[0] == "evaluation" else None
    words = evaluated or SUMMARY.get(path[-1]) or meaning(path[-1])
    return SUMMARY[path[0]] if words == UNKNOWN and path[0] in SUMMARY else words
