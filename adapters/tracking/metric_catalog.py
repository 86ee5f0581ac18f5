"""What each number of a run means, in one line, and which curves are drawn of them.

A metric `x` may come with `x_max`, the largest of what `x` is the mean of, and `x_hist`, how it is spread;
`heldout_x` is the same over rows never trained on.
Times of a step are `time_<phase>` in seconds; `time_step` is the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart of those `names` that a run logged; the rest are arguments of `svg.curves`."""

    group: str
    title: str
    names: tuple[str, ...]
    meaning: str
    log: bool = False
    zero: bool = False
    y_range: tuple[float, float] | None = None
    unless: str = ""  # not drawn where this metric is, which says the same


GROUPS = {
    "Learning": "Does it get better, and what does that do to its answers?",
    "Agreement": "Does the trainer give sampled tokens the probability that the sampler gave them?",
    "Optimiser": "How large and how regular are the updates?",
    "Experts": "Are a mixture's experts used alike?",
    "Asynchrony": "How old is what the trainer learns from?",
    "Speed": "How much work a second?",
    "Other": "Numbers that the recipe logged and this page has no description of.",
}

CHARTS = (
    Chart(
        "Learning", "Held-out accuracy", ("accuracy", "accuracy_sampled"),
        "Share of problems never trained on that were answered correctly.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Reward", ("reward",),
        "Mean reward of the samples trained on in this step. It should rise.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Spread of the reward", ("reward_std",),
        "Standard deviation of the reward over the samples of a step. 0 = nothing to compare.", zero=True,
    ),
    Chart(
        "Learning", "Likelihood loss", ("nll", "heldout_nll"),
        "Mean -log probability of the tokens to imitate, in nats a token. Lower is better.", zero=True,
    ),
    Chart(
        "Learning", "Preferences", ("preference_accuracy", "heldout_preference_accuracy"),
        "Share of pairs in which the chosen side scores higher than the rejected one.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Chosen and rejected", ("reward_chosen", "reward_rejected", "margin"),
        "What either side scores: beta log(policy / reference), or a reward model's score; and the difference.",
    ),
    Chart(
        "Learning", "Divergence", ("divergence", "heldout_divergence"),
        "Of the student from its teacher, nats a token. It should fall.", zero=True,
    ),
    Chart(
        "Learning", "Entropy", ("entropy", "heldout_entropy"),
        "Nats of uncertainty a token: 0 = always the same answer. A fast fall means exploration ends.",
        zero=True,
    ),
    Chart(
        "Learning", "Answer length", ("length", "length_max"),
        "Tokens sampled for one answer: the mean, and the longest of the step.", zero=True,
    ),
    Chart(
        "Learning", "Cut-off answers", ("truncated",),
        "Share of answers that ran into the length limit before they ended.", zero=True,
    ),
    Chart(
        "Learning", "Groups that teach nothing", ("solved_all", "solved_none"),
        "Share of prompts whose answers all got the same, best or worst, reward: no advantage, no gradient.",
        y_range=(0, 1),
    ),
    Chart(
        "Agreement", "Mismatch (k3)", ("mismatch_k3",),
        "Mean of r - 1 - log r, r = trainer / sampler probability. 0 = they agree; staleness adds to it.",
        log=True,
    ),
    Chart(
        "Agreement", "Log-probability difference", ("max_logp_diff",),
        "|trainer - sampler| in nats, for tokens of the current version: rounding, and nothing else.",
        log=True,
    ),
    Chart(
        "Agreement", "Mismatch (k3) now", ("mismatch_k3_now",),
        "The same for tokens of the current version alone: rounding, and nothing else.", log=True,
    ),
    Chart(
        "Speed", "Weight push", ("push_s", "push_stage_s", "push_pause_s", "push_load_s"),
        "Seconds of a push, and of it: until the weights were at the servers, while generation stood still, to load.",
        zero=True,
    ),
    Chart(
        "Speed", "Bytes of a push", ("push_bytes", "push_stage_bytes"),
        "Of the version, and fetched by all stagers together.", zero=True,
    ),
    Chart(
        "Speed", "Evaluation", ("evaluate_s",), "Seconds that held-out problems took, beside the step.", zero=True,
    ),
    Chart(
        "Agreement", "Importance weight", ("importance_weight", "importance_weight_max"),
        "Trainer / sampler probability of a token. The mean stays near 1 while samples are fresh enough.",
    ),
    Chart(
        "Agreement", "Dropped tokens", ("dropped_fraction",),
        "Share of tokens that the correction leaves out, by the bounds of their weight or by a mask.", zero=True,
    ),
    Chart(
        "Agreement", "Unusable tokens", ("unusable_fraction",),
        "Share of sampled tokens left out because the sampler's or the reference's log-probability was not finite. "
        "Anything above 0 is a fault of theirs.", zero=True,
    ),
    Chart(
        "Agreement", "KL to the reference", ("kl",),
        "How far the policy has moved from the reference model, in nats a token.", zero=True,
    ),
    Chart(
        "Optimiser", "Gradient norm", ("grad_norm",),
        "Length of the gradient before clipping. Spikes mean an unusual batch; nan or inf skips a step.",
        log=True, zero=True,
    ),
    Chart(
        "Optimiser", "Clipped tokens", ("clip_fraction",),
        "Share of tokens whose probability moved beyond the clip range, so that they pull no further.",
        zero=True,
    ),
    Chart(
        "Optimiser", "Policy ratio", ("ratio", "ratio_max"),
        "New / proximal probability of a token. Exactly 1 at the first update on a batch.",
    ),
    Chart(
        "Optimiser", "Objective", ("loss",),
        "What the update lowers: a surrogate whose gradient counts and whose level says little.",
        unless="nll",
    ),
    Chart(
        "Optimiser", "Skipped updates", ("skipped",),
        "1 where an update was left out because its gradient was not finite.", zero=True,
    ),
    Chart(
        "Optimiser", "Learning rate", ("learning_rate",), "Step size given to the optimiser.", zero=True
    ),
    Chart(
        "Optimiser", "Advantage", ("advantage",),
        "Mean |advantage| of a token: how strongly it is pushed. 0 = nothing left to learn.", zero=True,
    ),
    Chart(
        "Learning", "Spread of the entropy", ("entropy_p10", "entropy_p90"),
        "Nats of uncertainty below which a tenth, and nine tenths, of the tokens lie.", zero=True,
    ),
    Chart(
        "Learning", "Entropy by advantage", ("entropy_positive", "entropy_negative"),
        "Nats of uncertainty of the tokens that are pushed up, and of those that are pushed down.", zero=True,
    ),
    Chart(
        "Learning", "Solved at all", ("solved_any",),
        "Share of prompts for which some answer got a reward: what there is to learn from.", y_range=(0, 1),
    ),
    Chart(
        "Learning", "Odd answers", ("repetition", "empty", "aborted", "unscorable"),
        "Share that repeats itself, is empty, was aborted, or could not be marked.", zero=True,
    ),
    Chart(
        "Learning", "Length and reward", ("length_reward_correlation",),
        "Correlation over the answers of a step. A drift means that length itself is rewarded.", y_range=(-1, 1),
    ),
    Chart(
        "Agreement", "Probability error", ("prob_error",),
        "Mean of exp |trainer - sampler log-probability|. 1 = they agree; above 1.05 look for a bug.",
    ),
    Chart(
        "Agreement", "Correlation of probabilities", ("prob_pearson",),
        "Trainer's against sampler's probabilities of the sampled tokens. Below 0.99 look for a bug.",
    ),
    Chart(
        "Agreement", "Effective sample size", ("ess",),
        "(sum w)^2 / (n sum w^2) of the importance weights: 1 = all tokens weigh the same.", y_range=(0, 1),
    ),
    Chart(
        "Agreement", "Perplexity ratio", ("perplexity_ratio",),
        "exp of the mean log (trainer / sampler). 1 = they agree on average.",
    ),
    Chart(
        "Optimiser", "Relative update", ("update_ratio", "critic_update_ratio"),
        "Length of the update over that of the weights.", log=True,
    ),
    Chart(
        "Optimiser", "Critic", ("explained_variance",),
        "Share of the variance of the returns that the critic explains. Below 0 it does harm.",
    ),
    Chart(
        "Optimiser", "Error of values", ("value_error", "critic_loss"),
        "Squared error of the critic, in squared units of reward.", zero=True,
    ),
    Chart(
        "Experts", "Load", ("expert_load", "expert_load_max"),
        "Choices of the most used expert of a layer over the mean expert's: 1 = all are used alike. "
        "The mean over layers, and the worst layer.", zero=True,
    ),
    Chart(
        "Experts", "Idle experts", ("expert_idle", "expert_idle_max"),
        "Share of a layer's experts that no token of the step chose: the mean over layers, and the worst one.",
        zero=True,
    ),
    Chart(
        "Experts", "Balance loss", ("balance_load",),
        "E sum f P before its coefficient: experts a token where all are used alike.", zero=True,
    ),
    Chart(
        "Experts", "Router logits", ("balance_z",),
        "Mean squared log-sum-exp of the router's logits before its coefficient. Growth means overconfidence.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Policy version", ("version", "server_version"),
        "Batches consumed so far; what the server holds should follow at once.",
    ),
    Chart(
        "Asynchrony", "Staleness", ("staleness", "staleness_max"),
        "Batches between the version that sampled a token and the one that learns from it.", zero=True,
    ),
    Chart(
        "Asynchrony", "Length bias", ("length_bias",),
        "By which part answers that were trained on are longer than those begun. Below 0 long ones are missing.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Staleness of groups", ("group_staleness", "group_staleness_max"),
        "Batches between the admission of a group and the batch that took it. Never above eta.", zero=True,
    ),
    Chart(
        "Asynchrony", "Idle and busy", ("trainer_idle", "server_busy"),
        "Share of a step in which the trainer had nothing to do, and of the servers' time in which they had something.",
        y_range=(0, 1),
    ),
    Chart(
        "Asynchrony", "Requests in flight", ("requests_in_flight",),
        "Requests that all servers together held at a time.", zero=True,
    ),
    Chart(
        "Asynchrony", "Load of the slots", ("slot_load",),
        "Requests in flight over what the servers generate at a time: above 1 some waited there.", zero=True,
    ),
    Chart(
        "Asynchrony", "Age in the queues", ("group_wait_s", "group_wait_s_max", "request_wait_s", "request_wait_s_max"),
        "Seconds that finished groups waited for their batch, and requests for a server with room.", zero=True,
    ),
    Chart(
        "Asynchrony", "Left out", ("rejected", "refused", "failed", "stopped", "too_long"),
        "Groups without a sample, refused by the filter, lost to failing servers or surplus; and rows too long.",
        zero=True,
    ),
    Chart(
        "Asynchrony", "Tried again", ("retries", "lost", "request_retries", "reward_retries"),
        "Episodes, requests and rewards of the step that needed another attempt.", zero=True,
    ),
    Chart(
        "Speed", "Tokens a second", ("tokens_per_second", "rollout_tokens_per_second"),
        "Tokens learnt from, or generated, a second of wall time.", zero=True,
    ),
    Chart(
        "Speed", "Tokens a step", ("tokens", "generated_tokens"),
        "Tokens of the batch, prompts included, and of the completions that ended in the step.", zero=True,
    ),
    Chart(
        "Speed", "Size of a batch", ("groups", "samples", "effective_samples", "rows"),
        "Prompt groups and samples of a step, samples that push the policy anywhere, or problems of an evaluation.",
        zero=True,
    ),
)  # fmt: skip

METRICS = {
    "aborted": "share of answers that ended by a fault or an abort of the server",
    "accuracy": "share of held-out problems answered correctly, greedy decoding",
    "accuracy_sampled": "the same with answers sampled at the training temperature",
    "advantage": "mean |advantage| of a token: how far a reward lies from its group's mean",
    "balance_load": "E sum f P of a layer's experts, before its coefficient; experts a token = all are used alike",
    "balance_z": "squared log-sum-exp of a router's logits, before its coefficient",
    "bounded_fraction": "share of tokens whose importance weight lay outside its bounds and was cut or masked",
    "chi2_sequence": "mean squared importance weight of whole sequences, less 1; grows with staleness",
    "chi2_token": "mean squared importance weight of a token, less 1; grows with staleness",
    "clip_fraction": "share of tokens outside the clip range, which get no gradient",
    "clip_high_fraction": "of all tokens those of positive advantage that are clipped",
    "clip_low_fraction": "of all tokens those of negative advantage that are clipped",
    "critic_grad_norm": "length of the critic's gradient, before clipping",
    "critic_loss": "the critic's objective: half the squared error of values, clipped",
    "critic_skipped": "1 if the critic's update was left out because its gradient was not finite",
    "critic_update_ratio": "length of the critic's update over that of its weights",
    "divergence": "divergence of the student's next-token distribution from the teacher's, nats",
    "dropped_fraction": "share of tokens that the correction leaves out, by bounds or masks; they get no gradient",
    "dropped_sequences": "share of sequences of which the correction leaves no token",
    "dual_clip_fraction": "share of tokens of negative advantage whose gain the second clip bounds",
    "effective_fraction": "share of the samples with a learnt token whose advantage and weight are not 0",
    "effective_samples": "samples with a learnt token whose advantage and weight are not 0: what filters leave",
    "empty": "share of answers of no token but the end",
    "entropy": "uncertainty of the next token, nats; 0 = certain",
    "entropy_negative": "the same over tokens of negative advantage",
    "entropy_p10": "a tenth of the tokens has less uncertainty than this, nats",
    "entropy_p90": "a tenth of the tokens has more uncertainty than this, nats",
    "entropy_positive": "the same over tokens of positive advantage",
    "ess": "effective sample size: (sum w)^2 / (n sum w^2) of the importance weights; 1 = all weigh the same",
    "evaluate_s": "seconds that an evaluation took, beside the step",
    "expert_idle": "share of a layer's experts that no token chose",
    "expert_load": "choices of a layer's most used expert over the mean expert's; 1 = all are used alike",
    "explained_variance": "share of the returns' variance that the critic's values explain",
    "failed": "groups of the step that were given up because their servers failed",
    "fleet_healthy": "servers that take requests",
    "fleet_in_flight": "requests that all servers together hold",
    "fleet_servers": "servers of the fleet, in whatever state",
    "generated_tokens": "tokens of completions that ended in the step, evaluations included",
    "grad_norm": "length of the gradient over all parameters, before clipping",
    "group_staleness": "batch's version minus that at which a group was admitted",
    "group_wait_s": "seconds that a finished group waited for the batch that took it",
    "groups": "prompt groups in the batch",
    "groups_that_teach": "prompt groups whose rewards differ",
    "importance_weight": "proximal / sampled probability of a token; 1 = fresh and in agreement",
    "kl": "estimated KL divergence from the reference model, nats a token",
    "kl_baseline": "KTO's estimate of how far the policy is from the reference, nats a completion",
    "kl_coef": "coefficient of the divergence from the reference, where it moves",
    "kl_k1": "mean log (policy / reference) of a token, nats: unbiased, noisy",
    "kl_k3": "r - 1 - log r, r = reference / policy: unbiased, never negative",
    "learning_rate": "step size given to the optimiser",
    "left_out": "share of sequences that teach nothing: no partner, nothing to learn, a reference not finite",
    "length": "tokens the policy sampled for one answer",
    "length_begun": "tokens of an answer over the groups last begun, those estimated that were stopped or still run",
    "length_bias": "by which part of length_begun answers that were trained on are longer; below 0: they are shorter",
    "length_p50": "median of the tokens sampled for one answer",
    "length_p90": "a tenth of the answers is longer",
    "length_reward_correlation": "correlation of an answer's length and reward; a drift is a bias of length",
    "limit": "requests that the server with the lowest limit may hold at a time",
    "logp_chosen": "log-probability of a chosen completion, nats",
    "logp_diff": "|trainer - sampler| log-probability of a token before the update, staleness included, nats",
    "logp_rejected": "log-probability of a rejected completion, nats",
    "loss": "the objective that the update lowers",
    "lost": "episodes of the step whose servers failed for good, without which their groups go on",
    "margin": "how much higher the chosen side of a pair scores",
    "max_logp_diff": "largest |trainer - sampler| log-probability of a token of the current version, nats",
    "mismatch_k3": "mean of r - 1 - log r, r = trainer / sampler probability; 0 = equal",
    "mismatch_k3_now": "the same over tokens of the current version alone: rounding, and nothing else",
    "nll": "-log probability of a token to imitate, nats",
    "partial": "share of answers whose tokens come from several versions",
    "perplexity_ratio": "exp of the mean log (trainer / sampler) of a token",
    "ppo_kl": "mean log (proximal / new policy) of a token: exactly 0 at the first update on a batch",
    "preference": "the loss of a pair's two scores, before its coefficient",
    "preference_accuracy": "share of pairs in which the chosen side scores higher",
    "prob_diff": "|trainer - sampler| probability of a token before the update",
    "prob_error": "mean of exp |trainer - sampler log-probability|: 1 = they agree",
    "prob_pearson": "correlation of the trainer's and the sampler's probabilities of tokens",
    "push_bytes": "bytes of the files of the version that was pushed",
    "push_load_s": "seconds that the slowest server took to load the new weights",
    "push_pause_s": "seconds that generation stood still for new weights, on the slowest server",
    "push_probe_diff": "difference of a server's log-probabilities of a known prompt, mean nats a token",
    "push_prove_s": "seconds after a push until servers were seen to hold the new weights",
    "push_s": "seconds of a push of weights, writing included, beside the step",
    "push_stage_bytes": "bytes that stagers fetched for a push, all of them together",
    "push_stage_s": "seconds until the new weights were where the slowest server reads them",
    "push_total_s": "seconds of a push of weights, without writing them",
    "ratio": "new / proximal probability of a token; 1 before the first update on a batch",
    "ratio_min": "smallest new / proximal probability of a token",
    "refused": "groups of the step that were generated but not trained on, such as those of equal rewards",
    "rejected": "groups of the step for which the workflow gave no sample",
    "repetition": "share of runs of four tokens that stood in the same answer before",
    "request_retries": "requests of the step that were sent again: busy or broken servers, or one taken out of traffic",
    "request_wait_s": "seconds that a request waited for a server with room",
    "requests_in_flight": "requests that all servers together held at a time",
    "rest_s": "seconds until servers had released their memory to the trainer",
    "retries": "episodes of the step that were played again because a server failed",
    "return": "what a critic learns: advantage + value of a token",
    "reward": "reward of the samples of the step",
    "reward_chosen": "score of the chosen side: beta log(policy / reference), or a reward model's",
    "reward_retries": "rewards of the step that were computed again, because they raised, hung or died",
    "reward_rejected": "score of the rejected side",
    "reward_std": "standard deviation of the reward over the samples of the step",
    "rollout_tokens_per_second": "tokens generated a second of wall time, evaluations included",
    "rows": "problems that the evaluation answered",
    "samples": "samples in the batch",
    "score": "a reward model's score, of both sides",
    "seconds": "seconds that the run took so far, without those between two processes",
    "server_busy": "share of the servers' time in which each held at least one request of ours",
    "server_version": "policy version that the server reported",
    "skipped": "1 if the update was left out because its gradient was not finite",
    "slot_load": "requests in flight over the sequences that the servers generate at a time",
    "solved_all": "share of prompts for which every answer got the best reward",
    "solved_any": "share of prompts for which some answer got a reward: pass@k of the group's size",
    "solved_none": "share of prompts for which no answer got a reward",
    "staleness": "trainer's version minus the version that sampled a token, in batches",
    "staleness_span": "most versions between two tokens of one answer",
    "step": "newest step that was logged",
    "stopped": "groups of the step that were surplus and are run again, with oversampling",
    "tokens": "tokens of the samples of the step, prompts included",
    "tokens_per_second": "tokens of the samples of the step, a second of wall time",
    "too_long": "rows of the step that were left out because they do not fit into a packed row",
    "trainer_idle": "share of the step in which no update, save or host copy ran",
    "truncated": "share of answers cut off at the length limit",
    "unscorable": "share of answers without a reward, which teach nothing",
    "unusable_fraction": "share of sampled tokens whose log-probability was not finite, which teach nothing",
    "unusable_teacher": "share of tokens of which the teacher's numbers are not finite, which it does not teach",
    "update_ratio": "length of the update over that of the weights",
    "value": "what the critic expects at a token, in units of reward",
    "value_clip_fraction": "share of tokens whose value moved beyond the critic's clip",
    "value_error": "squared error of the critic's value at a token",
    "version": "policy version: batches consumed so far",
}

# Of these each line has a part of its own: they add up over the steps.
COUNTED = {
    "failed", "generated_tokens", "push_bytes", "push_stage_bytes", "refused", "rejected", "request_retries", "retries",
    "reward_retries", "samples", "skipped", "tokens", "too_long",
}  # fmt: skip

# Where a value deserves a look: (below, above). Bounds on agreement are those that other systems gate releases with:
# prob_error and prob_pearson NeMo RL and verl, logp_diff slime, mismatch_k3_now prime-rl.
ALARMS = {
    "aborted": (None, 0.05),
    "bounded_fraction": (None, 0.1),
    "clip_fraction": (None, 0.2),
    "critic_skipped": (None, 0),
    "dropped_fraction": (None, 0.2),
    "dropped_sequences": (None, 0.2),
    "empty": (None, 0.05),
    "entropy": (0.01, None),
    "ess": (0.5, None),
    "explained_variance": (0, None),
    "logp_diff": (None, 0.1),
    "mismatch_k3_now": (None, 0.001),
    "perplexity_ratio": (0.9, 1.1),
    "prob_error": (None, 1.05),
    "prob_pearson": (0.99, None),
    "ratio": (0.9, 1.1),
    "repetition": (None, 0.3),
    "skipped": (None, 0),
    "truncated": (None, 0.3),
    "unscorable": (None, 0.05),
    "unusable_fraction": (None, 0),
}

PHASES = {
    "rollout": ("waiting for rollout", "the trainer has nothing to do until a batch is complete"),
    "wait": ("waiting for servers", "the last push, or an evaluation, is not done yet"),
    "pack": ("packing", "samples are laid out in rows"),
    "score": ("scoring", "log-probabilities of the batch under the current weights"),
    "update": ("update", "forward, backward and optimiser"),
    "publish": ("copying weights", "the new weights are copied to the host, to be pushed beside the next step"),
    "save": ("saving", "checkpoint of parameters, optimiser and position"),
    "evaluate": ("evaluation", "held-out problems are answered and marked"),
    "other": ("the rest", "what no phase above accounts for"),
}

SUMMARY = {
    "sft_accuracy": "held-out accuracy after imitation, before reinforcement learning",
    "rl_accuracy": "held-out accuracy at the end",
    "sft_accuracy_sampled": "the same after imitation, answers sampled at temperature 1",
    "rl_accuracy_sampled": "the same at the end, answers sampled at temperature 1",
    "heldout_rows": "held-out problems that the accuracies are taken over",
    "sft_steps": "updates by imitation",
    "steps": "updates of this run",
    "complete": "whether all steps were taken",
    "rl_steps": "batches consumed by reinforcement learning",
    "version": "policy version at the end",
    "server_version": "policy version the server reported at the end; must equal the trainer's",
    "max_logp_diff": "largest |trainer - sampler| log-probability of a token of the current version, nats",
    "mismatch_k3": "mean of r - 1 - log r, r = trainer / sampler probability, over those tokens",
    "seconds": "wall time of the whole run",
    "checkpoint": "the trained model, a Hugging Face directory",
    "report": "this page",
    "eta": "batches that a sample may be old when it is learnt from",
    "seed": "seed of all randomness",
}


def label(name: str) -> str:
    """`grad_norm_max` -> `grad norm, largest`."""
    base = name.removesuffix("_max")
    return base.replace("_", " ") + (", largest" if base != name else "")


def meaning(name: str) -> str:
    """One line on what a metric is."""
    if name in METRICS:
        return METRICS[name]
    base = name.removesuffix("_max")
    if base in METRICS and base != name:
        return f"largest single value of: {METRICS[base]}"
    if name.startswith("reward_"):
        return f"mean of the part of the reward called {name.removeprefix('reward_')}"
    if name.startswith("fleet_"):
        return f"count of the fleet so far: {label(name.removeprefix('fleet_').removesuffix('_total'))}"
    if name.startswith("heldout_"):
        return f"over rows never trained on: {meaning(name.removeprefix('heldout_'))}"
    if name == "time_step":
        return "seconds of the whole step"
    phase = name.removeprefix("time_")
    if phase != name:
        return f"seconds: {PHASES[phase][1]}" if phase in PHASES else f"seconds spent on {label(phase)}"
    return "logged by the recipe under this name"


def alarm(name: str, value: float) -> str:
    """In words, on which side of its bounds a value lies: "below 0.5", "above 0.1", or ""."""
    below, above = ALARMS.get(name, (None, None))
    if below is not None and value < below:
        return f"below {below:g}"
    return f"above {above:g}" if above is not None and value > above else ""


def healthy(name: str) -> str:
    """The bounds of `ALARMS` in words, or ""."""
    below, above = ALARMS.get(name, (None, None))
    bounds = ("from", below), ("to", above)
    return " ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def result(name: str) -> str:
    """One line on what an entry of the summary is."""
    return SUMMARY.get(name) or meaning(name)
