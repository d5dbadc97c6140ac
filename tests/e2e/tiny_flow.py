"""A run of seconds of a flow model."""

from __future__ import annotations

SPEC = """name = "tiny"
out = "out"
device = "cpu"

[model]
kind = "scratch"
family = "digits_dit"

[model.config]
num_embeds_ada_norm = 10
sample_size = 8
in_channels = 1
out_channels = 1
patch_size = 4
num_layers = 2
num_attention_heads = 2
attention_head_dim = 8

[[phases]]
name = "sft"
steps = 4
algorithm = { kind = "flow_sft" }
data = [{ kind = "digits", limit = 40 }]
batch = { rows = 8 }
optimizers = [{ kind = "adamw", lr = 0.003 }]

[[phases]]
name = "grpo"
steps = 4
algorithm = { kind = "flow_grpo", samples = 4, minibatches = 2, kl_coef = 0.1, denoising = { steps = 3 } }
data = [{ kind = "digits", limit = 20 }]
batch = { rows = 4 }
optimizers = [{ kind = "adamw", lr = 0.003 }]
rewards = [{ kind = "function", function = "areno_fn.world.picture_rewards:brightness", weight = 0.5, name = "bright" }]

[evaluation]
data = [{ kind = "digits", split = "heldout", limit = 12 }]
rewards = [{ kind = "function", function = "areno_fn.world.picture_rewards:contrast" }]
denoising = { steps = 3 }
every = 2

[checkpoint]
every = 2

[log]
tensorboard = false
samples_every = 2
"""
