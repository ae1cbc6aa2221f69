"""Pretrained networks from a folder in the official format, with adapters: what trains, travels and is shared."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import piebald
from piebald import models
from piebald.contracts import Clients
from piebald.core.errors import SettingError
from piebald.core.parameters import Layout, copied, frozen_digest, matching
from piebald.engines.engine_choice import make_engine
from piebald.methods.sharing import AllExcept
from piebald.methods.training import DpSgd
from piebald.models.weights_folder import cached, find, mapped_tensors
from piebald.runtimes import Simulator

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install '.[hf]'")
peft = pytest.importorskip("peft", reason="needs the extra: pip install '.[hf]'")

LENGTH, WORDS = 7, 40


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sentences of five words and two of padding; the class is whether the first word has a high number."""
    x = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    x[:, 5:] = 0
    return x, (x[:, 0] >= WORDS // 2).long()


def some_clients(count: int = 3) -> Clients:
    held = {f"c{i}": rows(12 + i, i) for i in range(count)}
    made: Clients = piebald.clients_from(held, test=0.25, validation=0, tokens=True)
    return made


def trained(model: nn.Module, recipe: Any = "fedavg", engine: str = "sequential", **options: Any) -> piebald.Run:
    runtime = Simulator(engine=engine, workers=options.pop("workers", 0))
    return piebald.run(recipe, some_clients(), model, rounds=2, runtime=runtime, **{"evaluate_every": 0, **options})


def test_a_folder_gives_the_logits_that_transformers_gives(folder: Path) -> None:
    x, _ = rows(4, 0)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours = models.pretrained(folder).eval()
    wanted = theirs(input_ids=x, attention_mask=(x != 0).long()).logits
    assert torch.equal(ours(x), wanted)
    assert torch.equal(models.pretrained(folder, adapter="lora").eval()(x), wanted)  # B begins with zeros
    assert not torch.allclose(theirs(input_ids=x).logits, wanted)  # so padding is masked


def test_a_frozen_body_keeps_the_precision_of_its_file(stored: Path) -> None:
    """What is trained has float32, so that small steps are not lost."""
    dtype = getattr(torch, stored.name)
    x, _ = rows(4, 0)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(stored, dtype=dtype).eval()
    ours, wide = models.pretrained(stored, adapter="lora"), models.pretrained(stored, adapter="lora", dtype="float32")
    for model, wanted in ((ours, dtype), (wide, torch.float32), (models.pretrained(stored), torch.float32)):
        assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
        assert {one.dtype for one in model.parameters() if not one.requires_grad} <= {wanted}
        assert model(x).dtype == torch.float32
    logits = theirs(input_ids=x, attention_mask=(x != 0).long()).logits.float()
    precision = torch.finfo(dtype).eps  # theirs has the head in half precision, too
    torch.testing.assert_close(ours.eval()(x), logits, atol=2 * precision, rtol=2 * precision)


def test_only_adapters_and_head_are_in_the_vector_and_travel(folder: Path) -> None:
    model = models.pretrained(folder, outputs=2, adapter="lora", rank=4)
    adapters, head = 2 * 2 * 2 * 4 * 16, 16 * 16 + 16 + 16 * 2 + 2  # queries and values of two layers, A and B
    assert Layout.of(model).size == adapters + head
    run = trained(model)
    sent = 4 * (adapters + head) * len(some_clients())
    assert [(row["bytes_up"], row["bytes_down"]) for row in run.rounds] == [(sent, sent)] * 2
    assert not torch.equal(run.start(), run.work.initial)
    assert frozen_digest(run.work.model) == frozen_digest(model)


def frozen(model: nn.Module) -> dict[str, int]:
    return {name: one.data_ptr() for name, one in model.named_parameters() if not one.requires_grad}


def test_frozen_weights_are_in_memory_once(stored: Path) -> None:
    """All copies that a run makes share them, and they lie in the file's own pages, which processes share."""
    model = models.pretrained(stored, outputs=2, adapter="lora")
    run = trained(model)
    engine = make_engine("sequential", run.work, some_clients(), torch.device("cpu"), False)
    body = {name: place for name, place in frozen(model).items() if "original_module" not in name}
    assert body.items() <= frozen(run.work.model).items()
    assert body.items() <= frozen(engine.module).items()
    if sys.platform == "linux":
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [
            [int(end, 16) for end in row[0].split("-")] for row in maps if row[-1] == str(stored / "model.safetensors")
        ]
        assert all(any(low <= place < high for low, high in spans) for place in body.values())


def test_a_module_of_the_user_is_copied_once_and_shared_from_there() -> None:
    """What its owner does with it after the run changes nothing in the run."""
    model = nn.Sequential(nn.Embedding(WORDS, 8).requires_grad_(False), nn.Flatten(), nn.Linear(LENGTH * 8, 2))
    run = trained(model)
    before = frozen_digest(run.work.model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert frozen_digest(run.work.model) == before
    again = copied(run.work.model)
    assert frozen(again) == frozen(run.work.model)
    assert again[2].weight.data_ptr() != run.work.model[2].weight.data_ptr()
    mine = run.model()  # given away, so it shares nothing
    assert not {*frozen(mine).values()} & {*frozen(run.work.model).values()}


@pytest.mark.full
def test_inputs_may_come_by_name_with_a_mask(folder: Path) -> None:
    """As a tokenizer gives them: the same run as with ids alone, whose mask follows from the padding."""
    held = {f"c{i}": rows(12 + i, i) for i in range(3)}
    named = {who: ({"input_ids": x, "attention_mask": (x != 0).long()}, y) for who, (x, y) in held.items()}
    model = models.pretrained(folder, outputs=2, adapter="lora")
    runs = [
        piebald.run("fedavg", piebald.clients_from(one, test=0.25, validation=0, tokens=True), model, rounds=1)
        for one in (held, named)
    ]
    torch.testing.assert_close(runs[0].start(), runs[1].start())
    with pytest.raises(SettingError, match=r"give clients_from tokens=True, or \[data\] tokens = true"):
        model(torch.zeros(2, LENGTH))


def test_frozen_weights_are_on_a_device_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    there = torch.device("meta")
    first, second = copied(model, there), copied(model, there)
    assert first[0].weight is not second[0].weight
    places = [[layer.weight.untyped_storage()._cdata for layer in (*one,)] for one in (first, second)]
    assert [a == b for a, b in zip(*places, strict=True)] == [True, False]
    assert model[0].weight.device.type == "cpu"
    assert {one.device for one in first.parameters()} == {there}


def test_seeds_decide_adapters_and_new_heads(folder: Path) -> None:
    def start(seed: int, **settings: Any) -> Tensor:
        model = models.build_model("pretrained", (LENGTH,), 2, seed, weights=str(folder), adapter="lora", **settings)
        return Layout.of(model).flatten(model)

    before = torch.random.get_rng_state()
    assert torch.equal(start(3), start(3))
    assert not torch.equal(start(3), start(4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert models.count_parameters("pretrained", (LENGTH,), 2, 10**6, weights=str(folder), adapter="lora") < 10**4
    with pytest.raises(SettingError, match="more than the 100 parameters allowed"):
        models.count_parameters("pretrained", (LENGTH,), 2, 100, weights=str(folder))


@pytest.mark.full
def test_checkpointed_blocks_have_the_same_gradients_and_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with dropout, and whether the network names its blocks or the setting does."""
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=8, n_layers=2, n_heads=2, hidden_dim=8, max_position_embeddings=LENGTH, num_labels=2
    )
    with torch.random.fork_rng(devices=[]):
        transformers.DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "tiny")
    model = models.pretrained(tmp_path / "tiny", adapter="lora", rank=2)
    block, passes, ends = transformers.models.distilbert.modeling_distilbert.FFN, list[int](), list[Tensor]()
    forward = block.forward
    monkeypatch.setattr(
        block, "forward", lambda self, x: (passes.append(0) if self.training else None, forward(self, x))[1]
    )
    counts = []
    for layers in ((), "*.layer.*", "auto"):
        passes.clear()
        ends.append(trained(model, piebald.recipes.fedavg(lr=0.1, batch=5, checkpointing=layers)).start())
        counts.append(len(passes))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert counts[1] == counts[2] > 1.5 * counts[0]


@pytest.mark.full
@pytest.mark.parametrize("training", [None, DpSgd(lr=0.1, batch=5, clip=0.5, noise=0.0)], ids=["sgd", "dp_sgd"])
def test_engines_and_workers_agree_on_adapters(stored: Path, training: DpSgd | None) -> None:
    model = models.pretrained(stored, outputs=2, adapter="lora", rank=2)
    recipe = piebald.recipes.make("fedavg", lr=0.1, batch=5)
    recipe = recipe if training is None else recipe.model_copy(update={"training": training})
    expected = trained(model, recipe, "reference").start()
    assert float((expected - Layout.of(model).flatten(model)).norm()) > 0.01
    for engine, workers in (("sequential", 0), ("vmapped", 0), ("batched", 0), ("sequential", 2)):
        torch.testing.assert_close(trained(model, recipe, engine, workers=workers).start(), expected, atol=1e-6, rtol=0)


def test_private_adapters_stay_and_make_personal_models(folder: Path, tmp_path: Path) -> None:
    model = models.pretrained(folder, outputs=2, adapter="lora", rank=2)
    adapters = matching(model, ["adapter"])
    assert {name.split(".")[-3] for name in adapters} == {"lora_A", "lora_B"}
    recipe = piebald.recipes.make("fedavg", lr=0.1, batch=5)
    recipe = recipe.model_copy(update={"sharing": AllExcept(private_layers="adapter")})
    run = trained(model, recipe, out=tmp_path / "run")
    layout = run.work.layout
    assert layout.private == adapters
    assert run.rounds[0]["bytes_up"] == 4 * layout.shared * 3 == 4 * 3 * (16 * 16 + 16 + 16 * 2 + 2)
    first, second = (layout.flatten(run.model(client)) for client in ("c0", "c1"))
    assert torch.equal(first[: layout.shared], second[: layout.shared])
    assert not torch.equal(first[layout.shared :], second[layout.shared :])


def test_a_cluster_has_its_own_adapters(folder: Path) -> None:
    run = trained(models.pretrained(folder, outputs=2, adapter="lora", rank=2), "ifca")
    assert {model.numel() for model in run.cluster_models.values()} == {run.work.layout.size}
    assert any(not torch.equal(model, run.work.initial) for model in run.cluster_models.values())


@pytest.mark.parametrize(("recipe", "says"), [("distfl", "makes up inputs of real numbers"), ("cgau", "conditioning")])
def test_what_needs_layers_that_a_transformer_lacks_says_so(folder: Path, recipe: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        trained(models.pretrained(folder, outputs=2, adapter="lora"), recipe)


def test_exports_are_read_by_peft_and_come_back(stored: Path, tmp_path: Path) -> None:
    model = models.pretrained(stored, outputs=2, adapter="lora", rank=2)
    run = trained(model, evaluate_every=1, out=tmp_path / "run")
    saved = run.save(tmp_path / "card")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {one.name for one in saved.iterdir()}
    assert "federated-learning" in (saved / "README.md").read_text()
    assert str(stored) not in (saved / "adapter_config.json").read_text()  # no path of this machine
    assert (saved / "adapter_model.safetensors").stat().st_size < 4 * run.work.layout.size + 5000
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        stored, num_labels=2, ignore_mismatched_sizes=True, dtype=getattr(torch, stored.name)
    )
    again = peft.PeftModel.from_pretrained(base, saved).eval()
    x, _ = rows(4, 9)
    logits = again(input_ids=x, attention_mask=(x != 0).long()).logits.float()
    precision = 2 * torch.finfo(getattr(torch, stored.name)).eps  # peft reads the head in half precision, too
    torch.testing.assert_close(logits, run.model()(x), atol=precision, rtol=precision)
    whole = run.save(tmp_path / "whole.safetensors")
    assert torch.equal(piebald.load_weights(copy.deepcopy(model), whole)(x), run.model()(x))


@pytest.mark.full
def test_ranks_may_differ_and_peft_reads_each(folder: Path, tmp_path: Path) -> None:
    """The factor on the adapters' output is everybody's, and peft's file of a lower rank says so, too."""
    model = models.pretrained(folder, outputs=2, adapter="lora", rank=4, alpha=6)
    run = trained(model, piebald.recipes.flexlora(ranks=(4, 2), lr=0.5, batch=5), out=tmp_path / "run")
    saved = run.save(tmp_path / "lower", client="c1")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, ignore_mismatched_sizes=True
    )
    again = peft.PeftModel.from_pretrained(base, saved).eval()
    assert (again.peft_config["default"].r, again.peft_config["default"].lora_alpha) == (2, 3)
    x, _ = rows(4, 9)
    torch.testing.assert_close(again(input_ids=x, attention_mask=(x != 0).long()).logits, run.model("c1")(x))
    assert model.network.peft_config["default"].r == run.model("c0").network.peft_config["default"].r == 4


@pytest.mark.long
def test_inputs_with_names_are_recorded_with_names(folder: Path, tmp_path: Path) -> None:
    """torch.export takes a dict, ONNX its tensors by name; both any number of texts."""
    onnxruntime = pytest.importorskip("onnxruntime")
    x, y = rows(12, 0)
    held = {f"c{i}": ({"input_ids": x, "attention_mask": (x != 0).long()}, y) for i in range(2)}
    run = piebald.run(
        piebald.recipes.fedavg(lr=0.1), piebald.clients_from(held, tokens=True),
        models.pretrained(folder, 2, adapter="lora", rank=2), rounds=1,
        runtime=Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    ids, _ = rows(5, 3)
    texts = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    expected = run.model()(**texts).detach()
    program = torch.export.load(run.save(tmp_path / "m.pt2"))
    torch.testing.assert_close(program.module()(texts), expected)
    session = onnxruntime.InferenceSession(str(run.save(tmp_path / "m.onnx")))
    (found,) = session.run(["output"], {name: part.numpy() for name, part in texts.items()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)


LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_language_model_learns_in_adapters_alone(kind: str, tmp_path: Path) -> None:
    """Neither its head, which is as large as the vocabulary, nor constants such as rotary frequencies travel."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=WORDS, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, **LANGUAGE_MODELS[kind]
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    model = models.pretrained(tmp_path / "lm", task="causal_lm", adapter="lora", rank=2)
    assert all(".lora_" in slot.name and not slot.buffer for slot in Layout.of(model).slots)
    texts = {f"c{i}": (rows(12, i)[0], rows(12, i)[0]) for i in range(2)}
    run = piebald.run(
        "fedavg", piebald.clients_from(texts, tokens=True, test=0.25), model, rounds=1, loss="language_modelling",
        runtime=Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    assert run.metric == "perplexity"
    assert 1 < run.final["mean"] < 2 * WORDS
    with pytest.raises(SettingError, match=f"vocabulary has {WORDS}"):
        models.pretrained(tmp_path / "lm", WORDS + 1, task="causal_lm")


def test_a_network_without_adapters_is_trained_and_exported_whole(folder: Path, tmp_path: Path) -> None:
    model = models.pretrained(folder, outputs=2)
    assert Layout.of(model).size == sum(one.numel() for one in model.parameters())
    before = load_file(folder / "model.safetensors")
    run = trained(model)
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)  # the file is mapped, and never written to
    again = models.pretrained(run.save(tmp_path / "whole"))
    x, _ = rows(4, 9)
    assert torch.equal(again.eval()(x), run.model()(x))


def test_bodies_without_a_head_and_weights_in_parts_are_read(folder: Path, tmp_path: Path) -> None:
    network = transformers.AutoModel.from_pretrained(folder)
    network.save_pretrained(tmp_path / "parts", max_shard_size="5KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    x, _ = rows(4, 0)
    bodies = [models.pretrained(one, outputs=2).eval().network.distilbert for one in (folder, tmp_path / "parts")]
    first, second = (body(input_ids=x).last_hidden_state for body in bodies)
    assert torch.equal(first, second)


def test_targets_choose_the_layers(folder: Path) -> None:
    def layers(targets: Any) -> set[str]:
        model = models.pretrained(folder, adapter="lora", targets=targets)
        return {name.split(".lora_")[0].rpartition("distilbert.")[2] for name in matching(model, ["adapter"])}

    assert layers("attention") == {
        f"transformer.layer.{n}.attention.{one}" for n in (0, 1) for one in ("q_lin", "v_lin")
    }
    assert layers(["*.layer.0.ffn.*"]) == {"transformer.layer.0.ffn.lin1", "transformer.layer.0.ffn.lin2"}
    assert len(layers("all")) == 12


def test_a_run_goes_on_with_the_frozen_weights_that_it_had(folder: Path, tmp_path: Path) -> None:
    trained(models.pretrained(folder, outputs=2, adapter="lora"), out=tmp_path / "run")
    with torch.random.fork_rng(devices=[]):
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "others")
    with pytest.raises(SettingError, match="frozen weights are not those of the run in"):
        piebald.resume(
            tmp_path / "run", some_clients(), models.pretrained(tmp_path / "others", 2, adapter="lora"), rounds=3
        )


def test_names_are_looked_for_in_the_hubs_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cached("someone/tiny") is None
    with pytest.raises(SettingError, match="cannot be fetched from the Hugging Face Hub"):
        models.pretrained("someone/tiny")
    for name in ("../tiny", "/etc", "a/b/c", ""):
        assert cached(name) is None
    commit = "0123456789abcdef0123456789abcdef01234567"
    at = tmp_path / "models--someone--tiny"
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(commit)
    (at / "snapshots").mkdir()
    (at / "snapshots" / commit).symlink_to(folder)
    assert find("someone/tiny").revision == commit
    model = models.pretrained("someone/tiny", adapter="lora")
    assert model.source.described == f"someone/tiny of revision {commit}"
    assert frozen_digest(model) == frozen_digest(models.pretrained(folder, adapter="lora"))
    assert cached("someone/tiny", "v2") is None


def test_tensors_of_any_alignment_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3, dtype=torch.uint8), "b": torch.arange(5.0)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    for spaces in range(8):  # other writers do not pad the header
        (tmp_path / "model.safetensors").write_bytes(
            (len(header) + spaces).to_bytes(8, "little") + header + b" " * spaces + raw[8 + length :]
        )
        found = mapped_tensors(tmp_path)
        assert torch.equal(found["b"], torch.arange(5.0))
        assert torch.equal(found["a"], torch.arange(3, dtype=torch.uint8))
