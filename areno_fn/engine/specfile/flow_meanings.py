"""What the fields mean that are of flow models alone."""

from __future__ import annotations

_DENOISING = {
    "steps": "from noise to data, each asks the model once",
    "shift": "of the noise levels; above 1 stays longer at much noise; 0: as the model's own scheduler has them",
    "guidance": "weight of the condition against none; 1 asks the model once a step",
}

_STRENGTH = {"strength": "of what begins with a video: share of the steps that is made; 0: as its pipeline"}

_REFERRED = {
    "reference": "what the distance is from: the phase's start, or the model without its adapters",
    "reference_every": "iterations after which the reference becomes the actor; 0: never",
}

_FLOW_GROUPED = {
    "samples": "pictures of each prompt, the group",
    "combine": "several rewards are added, or each is compared within its group first",
    "baseline": "what a reward is compared with",
    "scale": "advantages are divided by this standard deviation",
    "max_advantage": "advantages are clipped to it",
    "kl_coef": "weight of the distance from the reference; 0 measures none",
    **_REFERRED,
    "draw_with": "whose parameters draw: the actor's, or its average's",
    "minibatches": "optimizer steps on one rollout",
    "epochs": "passes over one rollout",
}

_FLOW_COUPLED = _FLOW_GROUPED | {
    "denoising": "how they are drawn",
    "kl_space": "in which the distance from the reference is measured",
}

_FLOW_CLIPPED = _FLOW_COUPLED | {
    "clip_low": "the ratio of a step is clipped below 1 - clip_low",
    "clip_high": "and above 1 + clip_high",
}

_TIMES = {
    "times": "distribution of the noise levels trained at",
    "shift": "of these levels; above 1 means more noise",
    "until": "part of the way from noise to data that they are taken from",
}

_FLOW_NOISED = _FLOW_GROUPED | {
    "denoising": "how they are drawn",
    **_TIMES,
    "terms": "levels that every picture is noised to",
}

_FLOW_TAUGHT = {
    "samples": "pictures of each prompt",
    "teacher": "folder of the teacher; when empty, the actor as the phase begins",
    "teacher_guidance": "of the teacher; 1 for none",
}

_FLOW_MATCHED = _FLOW_TAUGHT | {
    "denoising": "how the generator draws, now and later",
    "fake_updates": "updates of the fake for each of the generator",
    "times": "distribution of the noise levels the judges are asked at",
    "shift": "of these levels; above 1 means more noise",
    "low": "least of these levels",
    "high": "largest of these levels",
}

_FLOW_TDM = _FLOW_MATCHED | {
    "query": "judges are asked above the end of a step, or between its ends",
    "huber": "width within which the generator's loss is quadratic; 0: everywhere",
    "snr_cap": "most that little noise counts for the fake; 0: it counts as much as any",
}

FLOW_MEANINGS: dict[str, dict[str, str]] = {
    "PipelineSpec": {
        "height": "of what is made, in pixels; 0: the model's own",
        "width": "likewise",
        "frames": "of a video; 0: the model's own",
        "guidance": "scale that a model with embedded guidance is told; 0: its family's",
        "guidance_2": "of the second of two transformers, where there is guidance; 0: as of the first",
        "compile": "compile the blocks of the transformer",
        "dtype": "of the frozen parts in memory",
        "parts": "other folders for frozen parts, by their names",
        "trained": "of several transformers, those that are trained, by component; when empty, all",
        "streams": "guidance of video with sound; when absent, as of its pipeline",
    },
    "StreamsSpec": {
        "audio": "weight of guidance for the sound",
        "perturbed": "how far both are led away from perturbed attention; 0: not",
        "isolated": "weight of guidance away from either stream alone; 1: none",
        "rescale": "share by which the deviation is brought back",
        "blocks": "whose attention is perturbed, from 0; when empty, as its pipeline",
    },
    "Denoising": {**_DENOISING, "solver": "of the equation from noise to data", **_STRENGTH},
    "NoisyDenoising": {
        **_DENOISING,
        "dynamics": "how noise enters a step",
        "level": "eta, how much",
        "noisy": "steps that may have noise, from 0; when empty, all but the last",
        "count": "how many of them have it in an iteration; 0: all",
        "window": "these are successive ones",
        **_STRENGTH,
    },
    "FlowSFT": {
        "times": "distribution of the noise levels trained at",
        "shift": "of these levels; above 1 means more noise",
        "weighting": "of the error at a level",
        "condition_dropout": "share of pictures trained without their condition, for guidance",
    },
    "FlowDPO": {
        **_REFERRED,
        "reference_every": "steps after which the reference becomes the actor; 0: never",
        "beta": "how dear a distance from the reference is",
        **_TIMES,
        "terms": "levels that every pair is noised to",
    },
    "FlowGRPO": _FLOW_CLIPPED,
    "FlowGRPOGuard": {
        **_FLOW_CLIPPED,
        "guard_step_reweight": "divide the term of a step by its length",
    },
    "FlowDPPO": {
        **_FLOW_COUPLED,
        "threshold": "how far a step may move to where its advantage wants it",
        "mask_space": "in which that is measured",
    },
    "Forgetting": {
        "start": "share of the copy that stays when the ramp begins",
        "flat": "optimizer steps of the phase for which the copy is what it follows",
        "rate": "what an optimizer step adds to that share",
        "cap": "and its largest",
    },
    "FewSteps": _DENOISING,
    "StudentDenoising": {
        **_DENOISING,
        "dynamics": "how noise enters a step; with ode there is none",
        "level": "eta, how much",
    },
    "FlowDMD2": _FLOW_MATCHED,
    "FlowTDM": _FLOW_TDM,
    "FlowTDMR1": {
        **_FLOW_TDM,
        "samples": "pictures of each prompt, the group",
        "combine": "rewards are added by weight and compared, or compared each by itself first",
        "baseline": "what a reward is compared with",
        "scale": "advantages are divided by this standard deviation",
        "mixture": "share of the teacher's guidance in the direction of the reward; the surrogate has the rest",
        "guidance_reward": "scale of that guidance; 0 leaves it out",
        "beta": "how sure the surrogate's preference of a group becomes",
        "max_advantage": "advantages are clipped to it",
        "trust": "how far the surrogate may leave its slow average for a picture; 0: no bound",
        "runaway": "squared distance from the teacher above which a picture is learned no further; 0: no bound",
        "anchor": "weight of the surrogate's squared distance from the teacher",
        "slow": "how the surrogate's own average follows it",
    },
    "Teacher": {
        "path": "folder of the teacher",
        "data": "names of the data sets whose prompts it teaches",
    },
    "FlowDistill": {
        **_FLOW_TAUGHT,
        "teachers": "several instead of one, each of its own data sets",
        "denoising": "how the student draws",
        "space": "in which its steps are compared with the teacher's; gaussian for noisy ones",
        "normalised": "a squared distance is divided by the mean absolute difference",
    },
    "FlowNFT": {
        **_FLOW_NOISED,
        "beta": "how far the velocities that are compared lie from the one that drew",
        "old": "a copy that draws, and how it follows the actor; when absent, the actor draws",
    },
    "FlowAWM": {
        **_FLOW_NOISED,
        "weighting": "of the velocity error that stands for a log-probability",
        "clip_low": "the ratio of a noised picture is clipped below 1 - clip_low",
        "clip_high": "and above 1 + clip_high",
        "ema_coef": "weight of the distance from the phase's average",
    },
    "FlowDGPO": {
        **_FLOW_NOISED,
        "beta": "scale of the preference",
        "clip": "how far the error of a picture may leave that of the copy; 0: any",
        "old": "a copy, and how it follows the actor",
        "draw_old": "optimizer steps after which the copy draws",
        "reference_guidance": "of the reference",
    },
    "FlowCRD": {
        **_FLOW_NOISED,
        "beta": "scale of the implicit reward",
        "loss": "of its difference from the reward",
        "temperature": "of the weights in a group's mean; below 0 they are equal",
        "kl_floor": "weight of the distance for the worst; kl_coef is that for the best",
        "reference_guidance": "of the reference",
        "old": "the copy that the reward is implicit against, and how it follows the actor",
        "sampler": "the copy that draws",
    },
    "FlowOnlineDPO": {
        **_FLOW_NOISED,
        "beta": "how dear a distance from the reference is",
    },
}
