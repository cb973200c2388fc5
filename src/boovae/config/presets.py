"""Settings that belong to a dataset, and those that `--preset` sets."""

from __future__ import annotations

from typing import Any

#: The paper's colour model.
FACES: dict[str, Any] = {
    "net": "conv:32",
    "latent_dim": 128,
    "likelihood": "normal",
    "log_variance_range": (-3.0, 4.0),
    "normalisation": "batch",
    "jitter": 0.1,
    "mirror": True,
    "components": 40,
    "coreset_images": 40,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "epochs": 300,
    "kl_weight": 2.0,
    "kl_warmup": 10,
    "samples": 200,
}

#: What the paper's tables fix per dataset, and a small model for the embedded digits.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "net": "mlp:128",
        "latent_dim": 10,
        "batch_size": 32,
        "learning_rate": 3e-3,
        "epochs": 70,
        "plateau_patience": 12,
        "early_stop": 30,
        "samples": 500,
        "generated": 5000,
        "boo_steps": 10,
        "distill_latents": 50,
    },
    "mnist": {"net": "mlp:300", "log_variance_range": (-6.0, 2.0), "learning_rate": 1e-3},
    "notmnist": {
        "net": "mlp:1024",
        "log_variance_range": (-4.0, 4.0),
        "learning_rate": 1e-3,
        "epochs": 300,
        "deform": 0.1,
        "distill_weight": 0.8,
    },
    "fashion_mnist": {"net": "mlp:1024", "log_variance_range": (-4.0, 4.0), "learning_rate": 1e-3},
    "celeba": FACES,
    "celeba64": FACES,
}

#: For the user's own data: tasks may be small, and of any size.
OWN_DATA: dict[str, Any] = {"epoch_steps": 20, "learning_rate": 1e-3}

#: What the paper has otherwise than the common preset, or than our own choice, for faces.
PAPER_FACES: dict[str, Any] = {
    "batch_size": 512,
    "learning_rate": 1e-3,
    "plateau_patience": 9,
    "early_stop": 15,
    "epochs": 300,
    "kl_warmup": 10,
}

#: What `--preset` sets, and what it sets for one dataset.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "schedule": "plateau",
        "batch_size": 250,
        "learning_rate": 5e-4,
        "plateau_patience": 30,
        "early_stop": 50,
        "epochs": 500,
        "kl_warmup": 0,
        "bound_samples": 1,
        "deform": 0.0,
        "mirror": False,
        "boo_objective": "literal",
        "boo_start": "noise",
        "boo_weights": "equal",
        "boo_prune": 0.001,
        "boo_lambda": 1.0,
        "boo_decoder": "teacher",
        "boo_steps": 500,
        "fashion_mnist": {"batch_size": 500, "epochs": 1000},
        "celeba": PAPER_FACES,
        "celeba64": PAPER_FACES,
        "digits": {"batch_size": 32, "learning_rate": 3e-3, "plateau_patience": 12, "early_stop": 20, "epochs": 100},
    },
}
