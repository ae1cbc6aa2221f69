"""Loading of exported weights into a module of the same architecture."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn

from piebald.core.arguments import PathLike, checked
from piebald.core.errors import SettingError
from piebald.core.reading.packed import opened_tensors, state_dict


@checked
def load_weights(module: nn.Module, path: PathLike) -> nn.Module:
    """Load weights that `Run.save` wrote into a module, in place.  Nothing in the file is executed.

    Args:
        module: a module of the architecture that was trained.
        path: a `.safetensors` or `.pt` file, or a folder with a model.safetensors.

    Returns:
        The module, in evaluation mode.

    Raises:
        SettingError: the file cannot be read, or its tensors are not those of the module.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    tensors = _read(file)
    state = module.state_dict()
    # both sides are compared, so that a longer network does not silently keep its random layers
    if unmatched := sorted(set(tensors) ^ set(state)):
        side = "the file" if unmatched[0] in tensors else "the module"
        raise SettingError(f"{file} does not fit {type(module).__name__}: only {side} has {unmatched[0]!r}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise SettingError(
                f"{file} does not fit {type(module).__name__}: {name} is {list(tensor.shape)} in the file and "
                f"{list(state[name].shape)} in the module"
            )
    module.load_state_dict(tensors)
    return module.eval()


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix in (".pt", ".pth"):
            state = state_dict(file)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise SettingError(f"{file} holds no state dict: it must map names to tensors")
            return state
        with opened_tensors(file) as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise SettingError(f"there is no file {file}: give one that Run.save or piebald export wrote") from None
    except SettingError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise SettingError(f"{file} cannot be read as weights: {str(error).splitlines()[0][:200]}") from None
    except Exception as error:  # torch.load raises pickle's errors for what is no list of tensors
        raise SettingError(
            f"{file} cannot be read as weights: it is no safe state dict ({type(error).__name__})"
        ) from None
