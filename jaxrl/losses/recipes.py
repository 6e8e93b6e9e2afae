"""The names that papers gave to combinations: for each the keys of the `algorithm` table that make it.

Where a paper's bounds are not given here they are the user's to set. [c]: read in a reference implementation; [t]: in the
paper's text. Distillation is not here: it takes a teacher, not a table.
"""

from typing import Any

_DECOUPLED = {"loss": "ppo_clip", "old_policy": "proximal", "mask_level": "token", "mask_low": 0.0, "mask_high": 5.0}
_REINFORCE = {"loss": "reinforce", "old_policy": "proximal"}  # its weight is π/μ
_PER_EPISODE = {"normaliser": "constant", "normaliser_constant": 1.0}

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"normaliser": "sequences"},  # arXiv:2402.03300 [t]
    "dr_grpo": {"scale_by_std": False, "normaliser": "constant"},  # arXiv:2503.20783 [t]
    "dapo": {"clip_high": 0.28},  # arXiv:2503.14476 [t]
    "rloo": {"loss": "reinforce", "baseline": "leave_one_out"},  # arXiv:2402.14740 [t]
    "reinforce": {"loss": "reinforce", "baseline": "none"},  # Williams, 1992
    "step_constant": {"turn_scaling": "constant", "turn_constant": 10.0},  # AsyncWebRL [c]
    "ppo": {"loss": "ppo_clip"},  # arXiv:1707.06347 [t]
    "cispo": {"loss": "cispo"},  # arXiv:2506.13585 [t]
    "gspo": {"loss": "gspo", "normaliser": "sequences", "clip_low": 3e-4, "clip_high": 4e-4},  # arXiv:2507.18071 [t]
    "decoupled_ppo": _DECOUPLED,  # AReaL, arXiv:2505.24298 [c]
    "a3po": _DECOUPLED | {"old_policy": "interpolated"},  # arXiv:2512.06547 [r]
    "tis": _REINFORCE | {"correction_cap": 2.0},  # verl, TRL [c], as are the next five
    "sequence_tis": _REINFORCE | {"correction_cap": 2.0, "correction_level": "sequence"},
    "mis": _REINFORCE | {"mask_level": "token", "mask_low": 0.5, "mask_high": 2.0},
    "sequence_mis": _REINFORCE | {"correction_level": "sequence", "mask_level": "sequence", "mask_low": 0.5, "mask_high": 2.0},
    "geometric_mis": _REINFORCE | {"mask_level": "geometric", "mask_low": 0.99, "mask_high": 1.01},
    "veto": _REINFORCE | {"veto": 1e-4},
    "icepop": {"mask_level": "token", "mask_low": 0.2, "mask_high": 5.0},  # prime-rl [c]
    "m2po": {"loss": "m2po"},  # arXiv:2510.01161 [c]
    "sao": {"loss": "sao", "baseline": "none", "clip_low": 0.3, "clip_high": 5.0},  # [t], the bounds for mathematics
    "sat": {"loss": "sat"},  # [t]
    "tba": {"loss": "tba", "baseline": "none", **_PER_EPISODE},  # arXiv:2503.18929 [c]
    "dpo": {"loss": "dpo", "baseline": "best_worst", **_PER_EPISODE},  # arXiv:2402.04792 [t]
}
