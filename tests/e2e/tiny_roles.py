"""A run of seconds that goes through every algorithm of several roles of flow models."""

from __future__ import annotations

from e2e.tiny_flow import SPEC as FLOW

_GENERATOR = "denoising = { steps = 2 }, fake_updates = 2"
_ADAMW = 'kind = "adamw", lr = 0.003'


def _phase(name: str, algorithm: str, *roles: str, more: str = "") -> str:
    optimizers = ", ".join(f'{{ {_ADAMW}, role = "{role}" }}' for role in ("actor", *roles))
    return f"""[[phases]]
name = "{name}"
steps = 2
algorithm = {{ {algorithm} }}
data = [{{ kind = "digits", limit = 20 }}]
batch = {{ rows = 4 }}
optimizers = [{optimizers}]
{more}
"""


_REWARD = 'rewards = [{ kind = "function", function = "areno_fn.world.picture_rewards:brightness" }]'
_SFT = FLOW[FLOW.index("[[phases]]") : FLOW.rindex("[[phases]]")].replace(
    'kind = "flow_sft"', 'kind = "flow_sft", condition_dropout = 0.1'
)

SPEC = (
    FLOW[: FLOW.index("[[phases]]")]
    + _SFT
    + _phase("dmd2", f'kind = "flow_dmd2", {_GENERATOR}', "fake", more="denoising = { steps = 2 }")
    + _phase("tdm", f'kind = "flow_tdm", teacher_guidance = 2.0, {_GENERATOR}', "fake", more="ema = { export = false }")
    + _phase(
        "r1",
        f'kind = "flow_tdm_r1", samples = 3, teacher_guidance = 2.0, {_GENERATOR}',
        "fake",
        "surrogate",
        more=_REWARD + '\noffload = ["reference", "slow"]',
    )
    + _phase("opd", 'kind = "flow_distill", teacher_guidance = 2.0, denoising = { steps = 2 }')
    + FLOW[FLOW.index("[evaluation]") :].replace("every = 2", "every = 1")
)
