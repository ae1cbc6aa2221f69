"""The model card of an exported model, and loading of its weights into a module of the same architecture.

A card says how the model was trained, on whom, how well it does for whom, and what protects them.  Its headings are
those of Mitchell et al. 2019, *Model Cards for Model Reporting*, as far as a run knows what belongs under them; what
only its makers know (intended use, licence) is left for them to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from piebald.core.arguments import PathLike, checked
from piebald.core.errors import SettingError
from piebald.core.plain_text import printable
from piebald.core.reading import opened_tensors, state_dict
from piebald.core.result_table import ResultTable
from piebald.report.page.wording import MetricFormat, megabytes, plural
from piebald.report.tables import History, mean

LISTED = 50  # clients named one by one; of more, only the groups are shown


def model_card(history: History, client: int | None = None) -> str:
    """The model card of a run's model in Markdown, with the front matter that the Hugging Face Hub reads.

    Args:
        history: the run.
        client: the number of the client whose personal model it is, None for the global model.
    """
    names = {row["client"]: _name(row) for row in history.clients}
    owner = "global model" if client is None else f"personal model of {names.get(client, f'client {client}')}"
    return "\n".join(
        [
            *_front_matter(history),
            "",
            f"# {printable(history.label)}: the {owner}",
            "",
            *_details(history),
            *_clients(history),
            *_scores(history, names, client),
            *_privacy(history),
            "## Intended use, limits and licence",
            "",
            "The run does not know them: to be written by whoever publishes the model.",
            "",
        ]
    )


def _front_matter(history: History) -> list[str]:
    metric = {"type": history.metric, "value": history.score.value, "name": f"mean {history.metric} over clients"}
    result = {
        "task": {"type": str(history.meta.get("objective"))},
        "dataset": {"name": "rows of the clients", "type": "federated"},
        "metrics": [metric],
    }
    index = [{"name": history.label, "results": [result]}]
    values = {"library_name": "piebald", "tags": ["federated-learning", history.recipe], "model-index": index}
    # JSON is YAML too, and quotes whatever a label may hold
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"]


def _details(history: History) -> Iterator[str]:
    meta, recipe = history.meta, history.meta.get("recipe")
    fields = recipe.get("fields", {}) if isinstance(recipe, dict) else {}
    rounds = history.rounds[-1]["version"] if history.rounds else 0
    yield from ["## Model and method", ""]
    yield f"- Model: {meta.get('model')}, {meta.get('parameters'):,} trained parameters, {meta.get('shared'):,} shared."
    yield f"- Method: {history.recipe} ({meta.get('paper') or 'no paper named'}), {plural(rounds, 'server step')}."
    if fields:
        yield "- Settings: " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + "."
    if classes := meta.get("classes"):
        yield f"- Classes, in the order of the outputs: {', '.join(printable(str(name)) for name in classes)}."
    figures = history.final
    yield f"- Traffic: {megabytes((figures['bytes_down'] + figures['bytes_up']) / 1e6)} MB, both ways."
    versions = ", ".join(f"{name} {meta.get(name)}" for name in ("piebald", "torch", "python"))
    yield f"- Seed {history.seed}; {versions}."
    yield ""


def _clients(history: History) -> Iterator[str]:
    count = int(history.meta.get("clients") or 0)
    trained = {row["client"] for row in history.results if row["kind"] == "train" and row["status"] == "ok"}
    yield from ["## Clients", "", f"{plural(count, 'client')}, of which {len(trained)} sent an update that counted."]
    sizes = [row["train"] for row in history.clients if row["train"] is not None]
    if sizes:
        yield f"Training rows: {sum(sizes):,} in all, {min(sizes):,} to {max(sizes):,} at a client."
    yield ""


def _scores(history: History, names: dict[int, str], client: int | None) -> Iterator[str]:
    shown = MetricFormat(history.metric)
    scores = history.per_client
    yield from [f"## {history.metric.capitalize()} on {history.split} rows", ""]
    if not scores:
        yield from ["The run evaluated no client.", ""]
        return
    rows = [(f"mean of {len(scores)}", history.score.value), ("worst tenth", history.final["worst_decile"])]
    for cluster, members in sorted(_clusters(history).items()):
        of_members = [scores[member] for member in members if member in scores]
        rows.append((f"cluster {cluster}, {plural(len(members), 'client')}", mean(of_members)))
    listed = [client] if client is not None else sorted(scores) if len(scores) <= LISTED else []
    rows += [(names.get(number, f"client {number}"), scores.get(number)) for number in listed]
    if history.common is not None:
        rows.append(("common test set, global model", history.common))
    heading = ("clients (each with its personal model, where it has one)", history.metric)
    yield ResultTable([(name, shown.value(value)) for name, value in rows], heading).markdown()
    yield ""


def _clusters(history: History) -> dict[int, list[int]]:
    """The clients by the cluster of their last result; nothing where there is one cluster."""
    last = {row["client"]: row["cluster"] for row in history.results if row["cluster"] is not None}
    members: dict[int, list[int]] = {}
    for client, cluster in last.items():
        members.setdefault(cluster, []).append(client)
    return members if len(members) > 1 else {}


def _privacy(history: History) -> Iterator[str]:
    yield from ["## Privacy", ""]
    budgets: Sequence[dict[str, Any]] | None = history.meta.get("privacy")
    if budgets is None:
        yield "No accountant was installed where the model was trained: nothing is claimed."
    elif not budgets:
        yield "The method adds no noise: no differential privacy is claimed."
    for budget in budgets or ():
        epsilons = [value for name in ("epsilon_rdp", "epsilon_pld") if (value := budget.get(name)) is not None]
        spent = f"epsilon = {min(epsilons):.3g} at delta = {budget['delta']:g}" if epsilons else "no finite epsilon"
        yield f"- {spent}, for each {budget['unit']}. {budget['meaning']}"
    yield ""


def _name(row: dict[str, Any]) -> str:
    # a name may have line breaks or control characters, which would end the line of a table
    name = printable(str(row["client"] if row["name"] is None else row["name"]))
    return f"client {name}" if name.isdecimal() else name


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
