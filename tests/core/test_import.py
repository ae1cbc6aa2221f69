"""`import piebald`: what it loads, and the public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import piebald

ROOT = Path(__file__).parents[2]


def loaded_after(code: str) -> set[str]:
    lines = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code", ["import piebald", "import piebald; dir(piebald)", "import piebald; piebald.__version__"]
)
def test_torch_waits_until_it_is_needed(code: str) -> None:
    assert not loaded_after(code) & {"torch", "numpy", "pandas", "pydantic", "sklearn", "matplotlib", "plotly"}


HEAVY = {
    *(
        "ray",
        "optuna",
        "pandas",
        "sklearn",
        "scipy",
        "matplotlib",
        "plotly",
        "torchmetrics",
        "torchvision",
        "torchaudio",
    ),
    *("datasets", "PIL", "h5py", "transformers", "peft", "onnx", "onnxruntime", "dp_accounting", "opacus", "nvflare"),
    *("flwr", "tenseal", "gmpy2", "pooch", "threadpoolctl", "mlflow", "wandb", "tensorboard", "typer"),
}
BEGIN = "import piebald; piebald.run; piebald.recipes.fedavg; piebald.models; piebald.partition; piebald.tune"


@pytest.mark.full
def test_nothing_heavy_but_torch_is_loaded_to_begin() -> None:
    loaded = loaded_after(BEGIN)
    by_torch = loaded_after("import torch")
    assert "torch" in loaded
    assert not (loaded - by_torch) & HEAVY
    assert not {name for name in loaded - by_torch if name.startswith("torch.") and "functional" not in name}


def test_the_command_line_loads_neither_torch_nor_pydantic() -> None:
    assert not loaded_after("from piebald.cli import main") & {"torch", "numpy", "pydantic", *HEAVY} - {"typer"}


@pytest.mark.full
def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_after("import piebald; piebald.Layout")


def test_the_public_names() -> None:
    assert piebald.__all__ == sorted(piebald.__all__)
    assert len(set(piebald.__all__)) == len(piebald.__all__)
    for name in piebald.__all__:
        assert getattr(piebald, name) is not None
        assert name in dir(piebald)
    assert not hasattr(piebald, "Nonsense")
