"""Every loss as its equation, over trajectories one by one: what the tests of losses and of packing compare with.

`x` has arrays [B, L], a trajectory per row, of numpy or of jax.numpy (`x.xp`). `x.logp` carries the gradient, `x.held` is
the same without one: what an equation writes as sg(log π). `c` is the algorithm's config.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl.losses.recipes import RECIPES


def per_episode(x, values):
    """Σ over the tokens of the episode, [B, 1]."""
    same = x.episode[:, None] == x.episode[None, :]
    return (same @ x.xp.where(x.mask, values, 0).sum(1))[:, None]


def per_group(x, values):
    same = x.group[:, None] == x.group[None, :]
    return (same @ x.xp.where(x.mask, values, 0).sum(1))[:, None]


def old(x, c):
    if c.old_policy == "sampling":
        return x.policy
    if c.old_policy == "interpolated":
        share = x.xp.where(x.lag > 1, (x.lag - 1) / x.xp.maximum(x.lag, 1), 0)
        return x.behaviour + share * (x.held - x.behaviour)
    return x.held if x.proximal is None else x.proximal


def w(x, c):
    """The weight of every token: TIS, MIS and the veto, at any level."""
    rho = x.xp.exp(old(x, c) - x.behaviour)
    product = x.xp.exp(per_episode(x, x.xp.log(rho)))
    mean = product ** (1 / per_episode(x, x.xp.ones_like(rho)))
    weight = x.xp.minimum(product if c.correction_level == "sequence" else rho, c.correction_cap)
    judged = {"none": None, "token": rho, "sequence": product, "geometric": mean}[c.mask_level]
    if judged is not None:
        weight = x.xp.where((judged >= c.mask_low) & (judged <= c.mask_high), weight, 0)
    vetoed = per_episode(x, x.xp.where(rho < c.veto, 1, 0)) > 0
    return x.xp.where(vetoed, 0, weight)


def clipped(x, r, low, high):
    return x.xp.minimum(r * x.advantage, x.xp.clip(r, low, high) * x.advantage)


def loss_of(x, c, objective):
    """−Σ weight · objective + the penalties."""
    d = x.logp - x.reference
    held = x.held - x.reference
    kl = {"k1": held + held * (x.logp - x.held), "k2": d**2 / 2, "k3": x.xp.exp(-d) - 1 + d}[c.kl_estimator]
    tokens = -objective - c.entropy_weight * x.entropy + c.kl_weight * kl
    return x.xp.where(x.mask, x.weight * tokens, 0).sum()


def ppo(x, c):
    r = x.xp.exp(x.logp - old(x, c))
    return loss_of(x, c, w(x, c) * clipped(x, r, 1 - c.clip_low, 1 + c.clip_high))


def cispo(x, c):
    r = x.xp.exp(x.held - old(x, c))
    return loss_of(x, c, w(x, c) * x.xp.minimum(r, 1 + c.clip_high) * x.advantage * x.logp)


def reinforce(x, c):
    return loss_of(x, c, w(x, c) * x.advantage * x.logp)


def gspo(x, c):
    mean_log_ratio = per_episode(x, x.held - old(x, c)) / per_episode(x, x.xp.ones_like(x.held))
    s = x.xp.exp(mean_log_ratio) * x.xp.exp(x.logp - x.held)
    return loss_of(x, c, w(x, c) * clipped(x, s, 1 - c.clip_low, 1 + c.clip_high))


def m2po(x, c):
    """Σ min(d², t²) grows with t²: up to the largest d² at which it is within the budget, and from there by a line."""
    d = x.held - old(x, c)
    touched = x.mask & (((x.advantage > 0) & (d > 0)) | ((x.advantage < 0) & (d < 0)))
    square = x.xp.where(touched, d**2, 0).ravel()
    at = x.xp.minimum(square[:, None], square[None, :]).sum(1)  # the sum at t² = each square; tokens not touched add 0
    budget = 0.04 * touched.sum()
    start = x.xp.where(at <= budget, square, 0).max()
    t = x.xp.sqrt(start + (budget - x.xp.where(at <= budget, at, 0).max()) / (square > start).sum())
    r = x.xp.exp(x.logp - old(x, c))
    return loss_of(x, c, w(x, c) * clipped(x, r, x.xp.exp(-t), x.xp.exp(t)))


def sao(x, c):
    r = x.xp.exp(x.held - old(x, c))
    f = x.xp.where((r > 1 - c.clip_low) & (r < 1 + c.clip_high), r, 0)
    return loss_of(x, c, w(x, c) * f * x.advantage * x.logp)


def sat(x, c):
    d = x.held - old(x, c)
    q = x.xp.nanquantile(x.xp.where(x.mask, x.xp.abs(d), x.xp.nan), 0.9)
    kernel = x.xp.where(x.xp.abs(d) <= q, 1, q**2 / (q**2 + (x.xp.abs(d) - q) ** 2))
    low = x.xp.where(d < 0, 1 - c.clip_low * kernel, 1 - c.clip_low)
    high = x.xp.where(d > 0, 1 + c.clip_high * kernel, 1 + c.clip_high)
    return loss_of(x, c, w(x, c) * clipped(x, x.xp.exp(x.logp - old(x, c)), low, high))


def tba(x, c):
    """Per prompt; the weight, one for all tokens of an episode, stands for 1 / number of episodes."""
    terms = per_episode(x, x.xp.ones_like(x.logp))
    reward = per_episode(x, x.advantage) / terms

    def flow(logp):
        return per_episode(x, logp - x.reference) - reward / c.beta

    log_z = -per_group(x, flow(x.held) / terms) / per_group(x, 1 / terms)
    square = (log_z + flow(x.logp)) ** 2
    return x.xp.where(x.mask, x.weight * square / terms, 0).sum()


def dpo(x, c):
    """Per group; twice the weight stands for 1 / number of groups, A is 1 for the best and -1 for the worst."""
    margin = per_group(x, x.advantage * (x.logp - x.reference))
    loss = x.xp.log(1 + x.xp.exp(-c.beta * margin))
    return x.xp.where(x.mask, 2 * x.weight * loss / per_group(x, x.xp.ones_like(x.logp)), 0).sum()


def distill_forward(x, c):
    p = x.xp.where(x.is_candidate, x.xp.exp(x.teacher), 0)
    return loss_of(x, c, -(p * (x.teacher - x.candidate)).sum(-1))


def distill_reverse(x, c):
    advantage = x.xp.where(x.is_candidate, x.teacher - x.candidate_held, 0)
    num = x.xp.maximum(x.is_candidate.sum(-1), 1)
    emitted, others = advantage[..., 0] * x.candidate[..., 0], (advantage[..., 1:] * x.candidate[..., 1:]).sum(-1)
    return loss_of(x, c, (w(x, c) * emitted + others) / num)


def sft(x, c):
    return -x.xp.where(x.mask, x.weight * x.logp, 0).sum()


class Case(NamedTuple):
    loss: str
    keys: dict[str, Any]
    equation: Callable
    gives_proximal: bool = False  # whether the rows give p


def _recipe(name: str, equation: Callable, gives_proximal: bool = False, **keys: Any) -> Case:
    """The recipe's keys, with bounds that some tokens of the tests lie within and others without."""
    common = {} if name in ("tba", "dpo") else {"entropy_weight": 0.03}
    table = RECIPES[name] | common | keys
    return Case(table.get("loss", "grpo"), {k: v for k, v in table.items() if k != "loss"}, equation, gives_proximal)


CASES = {
    "grpo": _recipe("grpo", ppo, correction_cap=1.3),
    "dr_grpo": _recipe("dr_grpo", ppo),
    "dapo": _recipe("dapo", ppo),
    "rloo": _recipe("rloo", reinforce, correction_cap=1.3),
    "reinforce": _recipe("reinforce", reinforce),
    "step_constant": _recipe("step_constant", ppo),
    "ppo": _recipe("ppo", ppo, clip_high=0.28, correction_cap=1.3),
    "cispo": _recipe("cispo", cispo, correction_cap=1.3),
    "gspo": _recipe("gspo", gspo, clip_low=0.1, clip_high=0.15),
    "decoupled_ppo": _recipe("decoupled_ppo", ppo, gives_proximal=True, mask_high=1.3),
    "one_step_decoupled_ppo": _recipe("decoupled_ppo", ppo, mask_high=1.3),
    "a3po": _recipe("a3po", ppo, mask_high=1.3),
    "tis": _recipe("tis", reinforce, correction_cap=1.3),
    "sequence_tis": _recipe("sequence_tis", reinforce),
    "mis": _recipe("mis", reinforce, mask_low=0.8, mask_high=1.3),
    "sequence_mis": _recipe("sequence_mis", reinforce),
    "geometric_mis": _recipe("geometric_mis", reinforce, mask_low=0.9, mask_high=1.1),
    "veto": _recipe("veto", reinforce, veto=0.4),
    "icepop": _recipe("icepop", ppo, mask_low=0.7, mask_high=1.3),
    "m2po": _recipe("m2po", m2po),
    "sao": _recipe("sao", sao, clip_high=0.4),
    "sat": _recipe("sat", sat, clip_low=0.6, clip_high=0.9),
    "tba": _recipe("tba", tba),
    "dpo": _recipe("dpo", dpo),
    "kl_k1": _recipe("grpo", ppo, kl_weight=0.2, kl_estimator="k1"),
    "kl_k2": _recipe("grpo", ppo, kl_weight=0.2, kl_estimator="k2"),
    "kl_k3": _recipe("grpo", ppo, kl_weight=0.2, kl_estimator="k3"),
    "distill_forward": Case("distill_forward", {"entropy_weight": 0.03}, distill_forward),
    "distill_reverse": Case("distill_reverse", {"entropy_weight": 0.03, "correction_cap": 1.3}, distill_reverse),
    "sft": Case("sft", {}, sft),
}
