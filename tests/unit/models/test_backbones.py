"""Networks by name: seeds, sizes, folders, the Hub's cache, and what is said when something is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.network_digest import checksums, digest
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import select
from fedgraft.models.backbones import NANO, at_size, interpolate_positions, load_network, model
from fedgraft.models.network import IMAGENET_MEAN, VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet, require_matching_torchvision
from fedgraft.models.vit_blocks import class_token_of

torch.set_num_threads(1)
SHARED = Path(__file__).parents[4] / "shared"


def train_images(size: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch_stream(0, "pixels"))


def backbone_size(net: VisionNetwork) -> int:
    return sum(p.numel() for p in net.backbone.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny ViT as save_pretrained writes it, pooler included, in half precision."""
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with quiet():
        model = t.ViTModel(t.ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.1, **sizes))
        model.half().save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_nano_is_embedded_and_float32() -> None:
    net = load_network("nano", 100)
    assert (net.depth, net.width, net.image_size, backbone_size(net)) == (6, 192, 32, 2_710_080)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in load_file(NANO / "model.safetensors").values()} == {torch.float16}
    assert net(train_images(32)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "width", "size", "count"),
    [
        ("tiny", 2, 32, 16, 31_840),
        ("vit-s16", 12, 384, 224, 21_665_664),
        ("resnet18", 4, 512, 32, 11_168_832),
        ("resnet18:norm=group", 4, 512, 32, 11_168_832),
        ("resnet18:width=16", 4, 128, 32, 700_176),
        ("vit:width=24,depth=1,heads=3,patch=4,size=12", 1, 24, 12, None),
    ],
)
def test_drawn_networks_have_their_shapes(name: str, depth: int, width: int, size: int, count: int | None) -> None:
    net = load_network(name, 10)
    assert (net.depth, net.width, net.image_size) == (depth, width, size)
    assert count is None or backbone_size(net) == count


def test_resnet_stem_keeps_small_images() -> None:
    net = load_network("resnet18:width=8", 10)
    assert net.features(train_images(32), 0, 1).shape == (2, 8, 32, 32)  # stem and stage 1 do not shrink
    assert net.features(train_images(32), 0, 3).shape == (2, 32, 8, 8)
    assert any("running_mean" in name for name, _ in net.named_buffers())
    assert len(select(net, lambda name: name.startswith("backbone.")).buffers) == 2 * 20
    group = load_network("resnet18:width=8,norm=group", 10)
    assert not list(group.named_buffers())
    assert torch.allclose(group(train_images(32))[0], group(train_images(32)[:1])[0], atol=1e-5)


def test_group_norm_does_not_look_at_the_batch() -> None:
    group, batch = (load_network(f"resnet18:width=8,norm={norm}", 10).train() for norm in ("group", "batch"))
    assert torch.allclose(group(train_images(32))[0], group(train_images(32)[:1])[0], atol=1e-4)
    assert not torch.allclose(batch(train_images(32))[0], batch(train_images(32)[:1])[0], atol=1e-4)


@pytest.mark.parametrize("name", ["nano", "tiny", "resnet18:width=8"])
def test_same_seed_same_bytes_and_nothing_else_disturbed(name: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, same, other = (load_network(name, 10, seed=seed) for seed in (1, 1, 2))
    torch.testing.assert_close(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert digest(one) == digest(same) != digest(other)
    assert not torch.equal(one.head.weight, other.head.weight)
    backbones_differ = digest(one, one.depth) != digest(other, other.depth)
    assert backbones_differ == (name != "nano")  # a pretrained backbone does not depend on the seed


def test_the_shared_generator_does_not_matter() -> None:
    torch.manual_seed(5)
    first = digest(load_network("tiny", 3))
    torch.manual_seed(6)
    assert digest(load_network("tiny", 3)) == first


def test_digest_sees_what_lies_before_an_entry_and_only_that() -> None:
    net = load_network("tiny", 3)
    entries = [0, 1, 2, None]
    before = [digest(net, entry) for entry in entries]
    quick = [checksums(net, entry) for entry in (1, 2)]
    assert len(set(before)) == 4
    updates = {
        "backbone.embeddings.cls_token": [False, True, True, True],
        "backbone.layers.0.mlp.fc1.bias": [False, True, True, True],
        "backbone.layers.1.mlp.fc1.bias": [False, False, True, True],
        "backbone.layernorm.bias": [False, False, True, True],
        "head.bias": [False, False, False, True],
    }
    for name, expected in updates.items():
        changed = load_network("tiny", 3)
        with torch.no_grad():
            changed.get_parameter(name).view(-1)[0].add_(1e-3)
        assert [digest(changed, entry) != old for entry, old in zip(entries, before, strict=True)] == expected, name
        assert [checksums(changed, entry) != old for entry, old in zip((1, 2), quick, strict=True)] == expected[1:3], (
            name
        )


def test_digest_sees_settings_and_statistics() -> None:
    one, two = (load_network(f"vit:width=16,heads={heads},depth=1", 3) for heads in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert digest(one) != digest(two)
    net = load_network("resnet18:width=8", 3)
    before, quick = digest(net, 1), checksums(net, 1)
    net.train()(train_images(32))
    assert digest(net, 1) != before and checksums(net, 1) != quick


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("size", [16, 32, 48, 64])
def test_positions_are_interpolated_like_transformers_does(size: int) -> None:
    base, resized = load_network("nano", 10), load_network("nano", 10, image_size=size)
    expected = base.backbone(train_images(size), interpolate_pos_encoding=True).last_hidden_state[:, 0]
    torch.testing.assert_close(resized.features(train_images(size)), expected, rtol=0, atol=1e-4)
    assert resized.get_parameter("backbone.embeddings.position_embeddings").shape[1] == (size // 8) ** 2 + 1
    assert resized.config.image_size == resized.image_size == size
    assert base.config.image_size == 32
    if size == 32:
        assert digest(resized) == digest(base)


def test_interpolation_keeps_leading_tokens_and_flat_fields() -> None:
    stream = torch_stream(0, "positions")
    lead, flat = torch.randn(1, 2, 4, generator=stream), torch.randn(1, 1, 4, generator=stream).expand(1, 9, 4)
    grown = interpolate_positions(torch.cat([lead, flat], 1), 2, 5)
    assert grown.shape == (1, 27, 4)
    assert torch.equal(grown[:, :2], lead)
    torch.testing.assert_close(grown[:, 2:], flat[:, :1].expand(1, 25, 4))
    with raises("E-MODELS-POSITIONS", patches=10):
        interpolate_positions(torch.zeros(1, 11, 4), 1, 4)


@pytest.mark.parametrize("kind", ["DeiT", "Dinov2", "Dinov2WithRegisters"])
@torch.no_grad()
def test_other_families_load_and_resize(kind: str, tmp_path: Path) -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 8,
    }
    with quiet():
        model = getattr(t, f"{kind}Model")(getattr(t, f"{kind}Config")(**sizes)).eval()
        model.save_pretrained(tmp_path / kind)
    net, resized = (load_network(tmp_path / kind, 3, image_size=size) for size in (None, 40))
    torch.testing.assert_close(
        net.features(train_images(24)), model(train_images(24)).last_hidden_state[:, 0], rtol=0, atol=1e-5
    )
    # DINOv2's models interpolate by themselves, DeiT on request.
    extra = {"interpolate_pos_encoding": True} if kind == "DeiT" else {}
    expected = model(train_images(40), **extra).last_hidden_state[:, 0]
    torch.testing.assert_close(resized.features(train_images(40)), expected, rtol=0, atol=1e-5)
    assert not [name for name, _ in net.backbone.named_parameters() if "mask_token" in name or "pooler" in name]


def stages(kind: str, **more: Any) -> Any:
    """A small classifier of a family with stages, straight from transformers."""
    import transformers as t

    sizes: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 4}
    if kind == "Swin":
        sizes = {"embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4, "num_labels": 4}
        sizes |= {"image_size": 32, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    elif kind == "ResNet":
        sizes |= {"embedding_size": 8, "layer_type": "basic"}
    else:
        sizes |= {"num_stages": 2, "drop_path_rate": 0.2}
    with quiet(), drawn_from(0):
        made = getattr(t, f"{kind}ForImageClassification")(getattr(t, f"{kind}Config")(**{**sizes, **more}))
    for parameter in made.parameters():  # zeros hide mistakes
        parameter.data += torch.randn(parameter.shape, generator=torch_stream(0, "more")) * 0.1
    return made.eval()


@pytest.mark.parametrize("kind", ["Swin", "ConvNext", "ConvNextV2", "ResNet"])
@torch.no_grad()
def test_families_with_stages_load_as_folder_and_as_object(kind: str, tmp_path: Path) -> None:
    theirs, fresh = stages(kind), stages(kind)  # a Swin remembers the first size it saw
    with quiet():
        theirs.save_pretrained(tmp_path / kind)
    folder, copied = model(tmp_path / kind), model(theirs)
    assert digest(folder) == digest(copied)
    assert (folder.depth, folder.width, folder.classes) == (2, 16, 4)
    images = train_images(folder.image_size)
    torch.testing.assert_close(folder(images), theirs(images).logits, rtol=0, atol=1e-5)
    assert torch.equal(folder(folder.features(images, 0, 1), 1), folder(images))
    copied.train()
    assert kind == "ResNet" or torch.equal(copied(images), folder(images))  # nothing random is left inside
    other = model(tmp_path / kind, image_size=64)
    torch.testing.assert_close(other(train_images(64)), fresh(train_images(64)).logits, rtol=0, atol=1e-5)


def test_swin_positions_and_windows(tmp_path: Path) -> None:
    theirs = stages("Swin", use_absolute_embeddings=True)
    ours = model(theirs, image_size=64)
    with torch.no_grad():
        expected = theirs(train_images(64), interpolate_pos_encoding=True).logits
        torch.testing.assert_close(ours(train_images(64)), expected, rtol=0, atol=1e-5)
    with raises("E-MODELS-WINDOWS", smallest=32):
        model(theirs, image_size=16)


def test_an_unknown_family_keeps_its_size(tmp_path: Path) -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    with quiet():
        t.BeitModel(t.BeitConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(tmp_path / "beit")
    assert load_network(tmp_path / "beit", 3).depth == 1
    with raises("E-MODELS-FIXED-SIZE", model_type="beit"):
        load_network(tmp_path / "beit", 3, image_size=64)


def test_objects_of_transformers_are_copied() -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = t.ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.5, **{**sizes, "num_labels": 3})
    with quiet():
        whole, base = t.ViTForImageClassification(config).eval(), t.ViTModel(config).eval()
    ours = model(whole)
    with torch.no_grad():
        torch.testing.assert_close(ours(train_images(16)), whole(train_images(16)).logits, rtol=0, atol=1e-6)
        ours.train()
        assert torch.equal(ours(train_images(16)), ours(train_images(16)))
        ours.head.bias.add_(1)
        next(iter(ours.backbone.parameters())).zero_()
    assert not torch.equal(ours.head.bias, whole.classifier.bias) and next(iter(whole.vit.parameters())).any()
    assert "ImageNet's mean and std" in ours.notes[0] and config.hidden_dropout_prob == 0.5
    told = model(whole, preprocessor=t.ViTImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3))
    assert (told.mean, told.notes, told.preprocessor["do_resize"]) == ((0.5,) * 3, (), True)  # type: ignore[index]
    assert model(base).classes == 0 and model(base, 7).classes == 7
    with raises("E-MODELS-SOURCE-TYPE", type="ReLU"):
        model(torch.nn.ReLU())


def test_a_network_may_wait_for_its_head() -> None:
    net = model("nano")
    assert net.classes == 0 and net(train_images(32)).shape == (2, 0)
    assert digest(net.with_head(9, 4)) == digest(load_network("nano", 9, seed=4))


def test_a_folder_loads_as_float32_without_pooler_and_dropout(folder: Path) -> None:
    net = load_network(folder, 3)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert backbone_size(net) == sum(t.numel() for name, t in stored.items() if not name.startswith("pooler"))
    net.train()
    assert torch.equal(net(train_images(16)), net(train_images(16)))
    assert net.config._attn_implementation == "eager"


def test_a_loaded_network_does_not_hang_on_its_file(tmp_path: Path) -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with quiet():
        t.ViTForImageClassification(t.ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path)
    net, path = load_network(tmp_path, None), tmp_path / "model.safetensors"
    before, length = digest(net), path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\0" * length)
    assert digest(net) == before


def test_preprocessing_and_licence_come_from_the_folder(folder: Path) -> None:
    bare = load_network(folder, 3)
    assert (bare.mean, bare.preprocessor, bare.licence, bare.source) == (IMAGENET_MEAN, None, "", "vit")
    path = folder / "preprocessor_config.json"
    said = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.25], "resample": 3, "size": {"shortest_edge": 16}}
    path.write_text(json.dumps(said))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# A card\nlicense: none\n")
    net = load_network(folder, 3)
    assert (net.std, net.preprocessor, net.licence) == ((0.5, 0.5, 0.25), said, "apache-2.0")
    path.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.5, 0.5, 0.5]}))
    with raises("E-MODELS-NORMALISATION"):
        load_network(folder, 3)


@pytest.mark.slow
def test_importing_is_light() -> None:
    code = "import sys, fedgraft.models.backbones, fedgraft.models.export; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_loading_says_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_network(folder, 3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "classes", "size", "code"),
    [
        ("nano", 0, None, "E-MODELS-CLASSES"),
        ("nano", 10, 30, "E-MODELS-PATCH"),
        ("nano", 10, 0, "E-MODELS-IMAGE-SIZE"),
        ("resnet18:width=8", 10, -4, "E-MODELS-IMAGE-SIZE"),
        ("nano", None, None, "E-MODELS-NO-HEAD"),
        ("tiny", None, None, "E-MODELS-NO-HEAD"),
        ("resnet19", 10, None, "E-MODELS-UNKNOWN"),
        ("./nowhere", 10, None, "E-MODELS-UNKNOWN"),
        ("resnet18:height=3", 10, None, "E-MODELS-OPTION"),
        ("resnet18:norm=layer", 10, None, "E-MODELS-OPTION-VALUE"),
        ("vit:width=many", 10, None, "E-MODELS-OPTION-VALUE"),
        ("vit:width=30,heads=4", 10, None, "E-MODELS-VIT-SHAPE"),
        ("vit:size=30", 10, None, "E-MODELS-VIT-SHAPE"),
    ],
)
def test_wrong_requests_get_a_sentence(name: str, classes: int | None, size: int | None, code: str) -> None:
    with raises(code):
        load_network(name, classes, image_size=size)


def test_broken_folders_get_a_sentence(folder: Path, tmp_path: Path) -> None:
    def refused(code: str) -> None:
        with raises(code) as caught:
            load_network(folder, 3)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)

    config, weights = folder / "config.json", folder / "model.safetensors"
    good, tensors = config.read_text(), {name: tensor.clone() for name, tensor in load_file(weights).items()}
    for text, code in (
        ("{", "E-MODELS-JSON"),
        ("[]", "E-MODELS-JSON"),
        ('{"model_type": "unheard"}', "E-MODELS-CONFIG"),
        (good.replace('"num_channels": 3', '"num_channels": 1'), "E-MODELS-CHANNELS"),
        (good.replace('"hidden_size": 16', '"hidden_size": 8'), "E-MODELS-WEIGHTS"),
        (good.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'), "E-MODELS-WEIGHTS-MISSING"),
        (good.replace('"hidden_size": 16', '"hidden_size": 1048576'), "E-MODELS-DECLARED-SIZE"),
    ):
        config.write_text(text)
        refused(code)
    config.write_text(good)
    weights.write_bytes(weights.read_bytes()[:2000])
    refused("E-MODELS-WEIGHTS")
    save_file(tensors, weights, metadata={"format": "pt"})
    load_network(folder, 3)
    weights.rename(folder / "pytorch_model.bin")
    refused("E-MODELS-PICKLED")
    (folder / "pytorch_model.bin").unlink()
    refused("E-MODELS-NO-WEIGHTS")
    config.unlink()
    refused("E-MODELS-NO-CONFIG")


def test_a_text_model_is_no_backbone(tmp_path: Path) -> None:
    import transformers as t

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    with quiet():
        t.BertModel(t.BertConfig(**sizes)).save_pretrained(tmp_path)  # type: ignore[arg-type]
    with raises("E-MODELS-NOT-VISION", model_type="bert"):
        load_network(tmp_path, 3)


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_folder_never_runs(known: bool, folder: Path) -> None:
    """A folder may name Python files as its model; with a known type they are passed over, else it is refused."""
    mark = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    config["model_type"] = "vit" if known else "evil"
    (folder / "config.json").write_text(json.dumps(config))
    if known:
        assert load_network(folder, 3).depth == 2
    else:
        with raises("E-MODELS-CONFIG"):
            load_network(folder, 3)
    assert not mark.exists()


def test_non_square_networks_are_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"image_size": 16', '"image_size": [16, 32]'))
    with raises("E-MODELS-NOT-SQUARE", size=(16, 32)):
        load_network(folder, 3)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without network and with an empty Hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_hub_out_of_reach_gets_a_sentence(offline: Path) -> None:
    with raises("E-MODELS-FETCH", name="facebook/dino-vits16") as caught:
        load_network("facebook/dino-vits16", 100)
    assert str(offline) in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_hub_name_is_read_from_the_cache(offline: Path, folder: Path) -> None:
    repository, commit = offline / "models--owner--vit", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / commit)
    assert backbone_size(load_network("owner/vit", 3)) > 0
    assert digest(load_network("owner/vit", 3)) == digest(load_network(f"owner/vit@{commit}", 3))
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    with raises("E-MODELS-HUB-PICKLED", name="owner/vit"):
        load_network("owner/vit", 3)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason="the real weights are not beside the project")
@pytest.mark.parametrize(("name", "size"), [("vit-tiny", 112), ("vit-tiny", 224), ("resnet50-imagenet", 112)])
@torch.no_grad()
def test_real_networks_answer_as_in_transformers(name: str, size: int) -> None:
    from transformers import AutoModelForImageClassification

    folder = SHARED / "weights" / name
    with quiet():
        options = {"dtype": torch.float32, "attn_implementation": "eager"}  # fused attention is off by 1.2e-5
        theirs = AutoModelForImageClassification.from_pretrained(folder, **options).eval()
    net, extra = model(folder, image_size=size), {} if "resnet" in name else {"interpolate_pos_encoding": True}
    expected = theirs(train_images(size), **extra).logits
    torch.testing.assert_close(net(train_images(size)), expected, rtol=0, atol=1e-5)
    assert net.classes == 1000 and float(expected.std()) > 0.1
    assert torch.equal(net(net.features(train_images(size), 0, 3), 3), net(train_images(size)))
    if name == "vit-tiny":
        assert (net.depth, net.width, net.mean, net.preprocessor["resample"]) == (12, 192, (0.5,) * 3, 3)  # type: ignore[index]
    else:
        assert (net.depth, net.width, backbone_size(net)) == (4, 2048, 23_508_032)
        resized: Any = at_size(net.backbone, 96)
        assert resized.config.image_size == 96


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_the_last_block_for_the_class_token_is_the_whole_block(name: str) -> None:
    """What the head reads and every gradient are those of the whole block; only what nobody reads is left out."""
    network = model(name, 3)
    images = torch.randn(4, 3, network.image_size, network.image_size, generator=torch_stream(0, "token"))

    def passed(whole: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        network.zero_grad()
        found = network.cut.run(network.backbone, images, 0, network.depth, whole)
        network.head(found).square().sum().backward()
        return found, {key: p.grad.clone() for key, p in network.named_parameters() if p.grad is not None}

    (short, some), (long, every) = passed(False), passed(True)
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-5)
    assert some.keys() == every.keys()
    scale = max(float(gradient.abs().max()) for gradient in every.values())  # keys' biases have none but noise
    for key, gradient in every.items():
        torch.testing.assert_close(some[key], gradient, rtol=1e-3, atol=1e-5 * scale)
    last = f"block{network.depth - 1}"
    seen = []
    hook = network.layer(last).register_forward_hook(lambda *_: seen.append(1))
    network.activations(images, [f"{last}.mlp"])
    network.features(images)
    hook.remove()
    assert len(seen) == 1, "probes see all tokens of the last block; a plain pass does not run it whole"


def test_the_class_token_of_an_image_has_the_same_bits_beside_any_others() -> None:
    """Else features would be computed anew for every partition; a whole block has them wherever products of rows do."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 768}
    block: Any = ViTModel(ViTConfig(**sizes, image_size=112)).layers[0].eval()
    hidden = torch.randn(32, 50, 192)

    def moves(passed: Any) -> bool:
        with torch.no_grad():
            return not torch.equal(passed(hidden.roll(7, 0)).roll(-7, 0), passed(hidden))

    if moves(block):
        pytest.skip("on this machine a row's bits depend on its place in every product")
    assert not moves(lambda x: class_token_of(block, x))


# ---- torchvision beside torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("matches", [True, False])
def test_a_torchvision_of_another_build_is_one_sentence(
    matches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such a build beside it `transformers` ends with `operator torchvision::nms does not exist`."""
    package = tmp_path / "torchvision"
    package.mkdir()
    code = "" if matches else "raise RuntimeError('operator torchvision::nms does not exist')"
    (package / "__init__.py").write_text(code)
    (tmp_path / "torchvision-0.99.dist-info").mkdir()
    (tmp_path / "torchvision-0.99.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.99\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    if matches:
        require_matching_torchvision()
        monkeypatch.delitem(sys.modules, "torchvision")
        return
    with raises("E-MODELS-TORCHVISION", torchvision="0.99"):
        model("vit:width=8,depth=1,heads=1,patch=8,size=16", 2)
