"""Every mistake in a run's description ends in one clear line, before anything is written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import CosineSimilarity
from torch import nn

from benchmarks.building.network import EmbeddingModel, batch_norms, build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.run import main
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.differences import changed
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.model import Model
from benchmarks.settings.recipe_files import read_entry, recipe_names
from benchmarks.settings.yaml_files import dump
from pml_regularizers import EmbeddingHead, VEMAttention

OURS, PML = "pml_regularizers", "pytorch_metric_learning"
HORDE, CONTRASTIVE = f"{OURS}.HORDELoss", f"{PML}.losses.ContrastiveLoss"
VEM, RATES = {"class_path": f"{OURS}.VEMAttention"}, "torch.optim.lr_scheduler"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def option(name: str, value: Any) -> str:
    return f"--{name}={json.dumps(value)}"


def loss(class_path: str, **arguments: Any) -> str:
    return option("losses", [{"loss": spec(class_path, **arguments)}])


MISTAKES = [  # (argument or content of a file, message)
    ("label: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("--label=HORDE, order 2", "label: 'HORDE, order 2'"),
    ("--config=nowhere.yaml", "nowhere.yaml: cannot be read"),
    ("losess: 1", "losses?"),
    ("--nothing_like_it=1", "nothing_like_it"),
    ("trust: [decimal]", "trust: "),
    ("--label=a\nb", "label: expected one line"),
    ("--losses=[]", "losses: expected at least one loss"),
    ("--losses=[{loss: {class_path: x.Y}, weight: .nan}]", "expected a finite number, got nan"),
    ("--data.augmentation=flip", "data.augmentation: expected one of 'multi_resolution', "),
    ("--report=often", "report: Expected a bool: expected one of 'neighbours', got often"),
    ("--precision=int8", "'fp16', got int8"),
    ("--losses=", "losses: Expected a list, got ''"),
    ("--label= ", "label: expected a name"),
    ("--recipe=", "recipe: expected PAPER/TABLE/ROW, got ''"),
    ("--recipe=glyphs/demo", "recipe: expected PAPER/TABLE/ROW, got 'glyphs/demo'"),
    ("--output=", "output: expected a path, got an empty text"),
    ("data: {cache: ~nobody.here/x}", "data.cache: expected a path, got '~nobody.here/x'"),
    ("--data.fold=4", "data.fold: expected 0 to 3, one of"),
    ("--data.resize=40", "data.resize: "),
    ("--data.batch_size=81", "data.batch_size: expected a multiple of data.samples_per"),
    ("--data.samples_per_class=100", "(100), got 80; 100 fits"),
    ("--evaluation.recall_at=[]", "evaluation.recall_at: expected at least one K"),
    ("{protocol: fair, evaluation: {oracle: true}}", "evaluation.oracle: "),
    ("{protocol: fair, optimization: {steps: 0}}", "optimization.steps: 0 "),
    ("--data.split=all", "data.split: all "),
    ("--data={dataset: table, table: t.csv, known_classes: true}", "data.known_classes: "),
    ("{protocol: fair, evaluation: {every: 0}}", "evaluation.every: "),
    ("--evaluation={oracle: true, every: 0}", "evaluation.oracle: "),
    ("--evaluation.divergence=true", "evaluation.divergence: "),
    ("--evaluation.orders=true", "evaluation.orders: "),
    ("--evaluation.clustering=true", "evaluation.clustering: "),
    ("--precision=fp16", "precision: fp16 "),
    ("--data.cached_views=2", "data.cached_views: "),
    ("--model.weights=.", "model.weights: . "),
    ("--model={head: pca, embedding_size: 200}", "model.embedding_size: 200 "),
    ("--model={replace_layer: pca, embedding_size: 200}", "model.embedding_size: 200 "),
    ("--model={replace_layer: whitened, embedding_size: 200}", "model.embedding_size: 200 "),
    ("{model: {head: pca, replace_layer: pca}, optimization: {steps: 0}}", "model.replace_layer: "),
    ("{model: {replace_layer: features}, evaluation: {oracle: true}}", "evaluation.oracle: tests "),
    (
        "{model: {replace_layer: features}, "
        f"losses: [{{loss: {{class_path: {HORDE}, init_args: {{loss: {{class_path: {CONTRASTIVE}}}}}}}}}]}}",
        "evaluation.descriptor: HORDE trains beside",
    ),
    ("--model={head: pca, bias: true}", "model.bias: "),
    ("--model={head: pca, ensemble: {stage: layer2}}", "model.head: an ensemble has its own"),
    ("--model.frozen_stages=4", "timm's stages of ResNet: layer1, "),
    ("--data=settings.yaml", "data: expected a mapping of settings, got 'settings.yaml'"),
    ("--model.ensemble=true", "model.ensemble: expected a mapping of settings, got True"),
    ("--miner.class_path=X", "miner.class_path: miner is given as a whole; write --miner '{"),
    ("--losses[0].weight=2", "losses[0].weight: losses is given as a whole; write --losses '[{"),
    ("--optimization.overrides={model.head.fc: {lr: fast}}", "got {'lr': 'fast'}"),
    ("--optimization.overrides={model.head.fc: {learning_rate: 1}}", "Adam has no such setting"),
    (loss(f"{PML}.losses.ContrastLoss"), "losses[0].loss.class_path: cannot"),
    (loss(CONTRASTIVE, pos_margn=1), "losses[0].loss.init_args.pos_margn: "),
    (loss(HORDE, order=1, loss=spec(CONTRASTIVE)), "losses[0].loss: HORDELoss: order: expected"),
    (loss(f"{PML}.losses.ArcFaceLoss", num_classes=5), "losses[0].loss.init_args.num_classes:"),
    ("--model.trunk=hf_hub:timm/resnet18.a1_in1k", "model.trunk: "),
    ("--model.trunk_args={global_pool: avg}", "model.trunk_args.global_pool: "),
    ("--model={trunk: bn_inception, trunk_args: {pretrained: true}}", "random init;"),
    ("{optimization: {chunk_size: 8}, diagnose_every: 5}", "diagnose_every: "),
    (option("model", {"ensemble": {"stage": "layer1"}, "attention": VEM}), "model.attention: "),
    (loss(f"{PML}.losses.NTXentLoss", temperature=1e-300), "ValueError: the loss is nan"),
    ("--diagnose_every=1", "diagnose_every: a trial step failed: ValueError: loss: "),
    (option("optimization.scheduler", spec(f"{RATES}.ReduceLROnPlateau")), "tion.scheduler"),
    # A text in quotation marks is no number and no truth value.
    (option("optimization.optimizer", spec("torch.optim.Adam", betas=["0", 1])), "betas[0]"),
    (loss(HORDE, loss=spec(f"{OURS}.BinomialDevianceLoss", balanced="false")), "args.balanced"),
    ("--model.trunk_args={a: {b: ['0.5']}}", "model.trunk_args.a.b[0]"),
    ("--optimization.overrides={model.head: {maximize: 'off'}}", "model.head.maximize: expected"),
    ("model: {trunk_args: {x: '010'}}", "model.trunk_args.x: expected a value, got the text '010'"),
    # Programs read it as different numbers.
    ("--data.batch_size=010", "<2147483648, got '010'"),
    ("data: {batch_size: '010'}", "data.batch_size: expected an integer >=2"),
    ("--model.trunk_args.output_stride=010", "output_stride: expected a number in decimal digits"),
]


@pytest.mark.parametrize(("argument", "expected"), MISTAKES)
def test_a_mistake_is_one_line(argument, expected, empty, glyphs_root, refused, monkeypatch):
    """On a machine without a GPU and without faiss."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("benchmarks.training.launcher.find_spec", lambda name: None)
    if not argument.startswith("--"):
        (empty / "c.yaml").write_text(argument)
        argument = "--config=c.yaml"
    before = [*empty.iterdir()]
    words = ["--recipe=glyphs/demo/binomial", f"--data.root={glyphs_root}", argument]
    assert expected in refused(main, *words)
    assert [*empty.iterdir()] == before


def test_a_hint_stays_in_its_group():
    for option, line in (
        ("model.ensemble.stages=layer1", "^model.ensemble: Option 'stages' is not accepted$"),
        ("optimization.lr=1", "--optimization.lr=1$"),
        ("steps=1", "--steps=1; did you mean optimization.steps"),
        ("data.batch-size=1", "=1; did you mean data.batch_size"),
    ):
        with pytest.raises(ConfigError, match=line):
            parse([f"--{option}"])


def test_values_at_paths_are_read_as_the_parser_reads_them():
    first = parse([loss(CONTRASTIVE, pos_margin=0.5)]).experiment
    values = {"seed": 3, "data.fold": 2, "output": "x", "losses[0].weight": 2}
    values |= {"losses[0].loss.init_args.pos_margin": 1, "model.weights": None}
    options = ["--seed=3", "--data.fold=2", "--output=x", "--label=ContrastiveLoss"]
    term = {"loss": spec(CONTRASTIVE, pos_margin=1), "weight": 2}
    expected = parse([*options, option("losses", [term])]).experiment
    assert changed(first, values) == expected
    assert first == parse([loss(CONTRASTIVE, pos_margin=0.5)]).experiment
    for path, value, told in (
        ("seed", 2**32, "seed: expected an integer >=0 and <4294967296, got 4294967296"),
        ("data.fold", 4, "data.fold: expected 0 to 3"),
        ("model.pol", "avg", "model.pol: leads nowhere"),
        ("losses[0].weight", "much", "losses[0].weight: expected a finite number, got 'much'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            changed(first, {path: value})


def test_a_path_may_begin_with_the_users_folder(empty, monkeypatch):
    """A shell leaves --output=~/x as it is."""
    monkeypatch.setenv("HOME", f"{empty}")
    (empty / "a.yaml").write_text("data: {cache: ~/cache}")
    run = parse(["--config=~/a.yaml", "--output=~/x"]).experiment
    assert (run.output, run.data.cache) == (empty / "x", empty / "cache")


def test_layers_override_each_other(empty):
    (empty / "a.yaml").write_text("seed: 3\noptimization: {learning_rate: 1e-5, steps: 7}")
    (empty / "b.yaml").write_text("optimization: {steps: 8}")
    options = ["--seed=4", "--data.folds=9", "--data={max_classes: 8}", "--data.root", "data"]
    files = ["--config=a.yaml", "--config=b.yaml"]
    run = parse(["--recipe=glyphs/demo/binomial_horde", *files, *options]).experiment
    assert run.label == "binomial deviance + HORDE"
    assert (run.seed, run.optimization.steps, run.optimization.learning_rate) == (4, 8, 1e-5)
    assert (run.data.samples_per_class, run.data.folds, run.data.max_classes) == (4, 9, 8)
    assert run.output == Path("runs/glyphs-demo-binomial_horde-seed4")


def test_the_folder_is_named_after_what_is_run(empty):
    """A label holds for the losses and the miner that it was given with."""
    for argv, name in (
        (["--recipe=images/resnet50/binomial", "--data.root=p/shop"], "images-resnet50-binomial"),
        (["--data={dataset: folder, root: p/shop}", "--label=mine"], "shop-test_resnet-mine"),
        (["--label=mine + ../HORDE"], "glyphs-test_resnet-mine-..-HORDE"),
        (["--config=own.yaml"], "own"),
        ([loss(HORDE, loss=spec(CONTRASTIVE))], "glyphs-test_resnet-HORDELoss-ContrastiveLoss"),
        (["--miner={class_path: a.M}"], "glyphs-test_resnet-BinomialDevianceLoss-M"),
        (["--config=own.yaml", loss(CONTRASTIVE)], "glyphs-resnet18-ContrastiveLoss"),
        ([loss(CONTRASTIVE), "--label", "mine"], "glyphs-test_resnet-mine"),
    ):
        (empty / "own.yaml").write_text("{label: mine, model: {trunk: resnet18}}")
        assert parse([*argv, "--seed=2"]).experiment.output == Path(f"runs/{name}-seed2")


def test_a_list_replaces_the_one_before_it_and_a_plus_appends(empty):
    """No gap of a term is filled from the term that had its place."""
    first, second = {"loss": {"class_path": "a.A"}}, {"loss": {"class_path": "b.B"}, "weight": 3.0}
    (empty / "a.yaml").write_text(dump({"losses": [second, second]}))
    argv = ["--recipe=glyphs/finetune/binomial_energy_confusion", "--config=a.yaml"]
    assert parse(argv).config["losses"] == [second, second]
    argv += [option("losses", [first])]
    assert parse(argv).config["losses"] == [first | {"weight": 1.0}]
    argv += [option("losses+", second)]
    assert parse(argv).config["losses"] == [first | {"weight": 1.0}, second]


def test_the_dumped_config_is_the_experiment(empty):
    text = ["--label=1e5", "--miner={class_path: X, init_args: {text: '1.5e-3', number: 1e5}}"]
    first = parse(["--recipe=glyphs/demo/binomial_horde", "--seed=2", *text])
    assert first.config["miner"]["init_args"] == {"text": "1.5e-3", "number": 1e5}
    (empty / "again.yaml").write_text(dump(first.config))
    second = parse(["--config=again.yaml", "--output=x"])
    second.experiment.output = first.experiment.output
    assert second.experiment == first.experiment


def test_seeds_and_folds_take_turns_in_a_folder_of_weights(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "SHA256SUMS").touch()
    runs = [
        parse([f"--model.weights={tmp_path}", f"--seed={seed}", f"--data.fold={fold}"])
        for seed, fold in ((0, 0), (1, 0), (2, 0), (2, 3))
    ]
    assert [run.experiment.network.weights.stem for run in runs] == ["a", "b", "a", "b"]
    assert {run.config["model"]["weights"] for run in runs} == {str(tmp_path)}


def test_a_recipe_finds_its_weights_from_anywhere(empty):
    run = parse(["--recipe=glyphs/finetune/binomial", "--seed=1"]).experiment
    assert run.network.weights.is_file()
    build_model(run.network, run.data)


def test_builds_nested_classes_with_the_sizes_of_the_run():
    arcface = spec(f"{PML}.losses.ArcFaceLoss", margin=20)
    cosine = spec(f"{PML}.distances.CosineSimilarity")
    terms = [
        {"loss": spec(HORDE, embed_orders=True, moment_dim=16, loss=arcface)},
        {"loss": spec(CONTRASTIVE, distance=cosine, pos_margin=1, neg_margin=0), "weight": 0.5},
        {"loss": spec(CONTRASTIVE), "weight": 2},
    ]
    miner = option("miner", spec(f"{PML}.miners.MultiSimilarityMiner"))
    model = build_model(Model(embedding_size=8), Data())
    loss = build_loss(parse([option("losses", terms), miner]).experiment, model, num_classes=11)
    assert isinstance(loss.miner, miners.MultiSimilarityMiner)
    assert [*loss.loss.weights.values()] == [1.0, 0.5, 2.0]
    horde, contrastive, _ = loss.loss.losses.values()
    assert horde.losses["order_3"].W.shape == (8, 11)
    assert horde.moments.in_channels == 96
    assert isinstance(contrastive.distance, CosineSimilarity)
    assert loss(model(torch.randn(4, 1, 32, 32)), torch.tensor([0, 0, 1, 1])).isfinite()


def test_parts_have_their_own_settings():
    overrides = "--optimization.overrides={model.head.fc: {lr: 1e-2, weight_decay: 0.5}}"
    attention = option("model.attention", spec(f"{OURS}.VEMAttention", init="zeros"))
    run = parse([overrides, attention]).experiment
    model = build_model(run.model, run.data)
    assert model.head.attention.init == "zeros"
    loss = build_loss(run, model, num_classes=3)
    optimizer, _ = build_optimizer(run.optimization, model, loss)
    groups = {group["name"]: group for group in optimizer.param_groups}
    rates = {name: group["max_lr"] for name, group in groups.items()}
    own = dict.fromkeys(("model.head.attention", "model.head.fc"), 1e-2)
    assert rates == {"model": run.optimization.learning_rate, **own}
    assert groups["model.head.fc"]["weight_decay"] == 0.5


def test_recipes_give_the_boundary_of_margin_loss_its_authors_rate():
    """Wu et al.: 5e-4, without decay. A distance hardly moves at a trunk's rate."""
    found = set()
    for name in recipe_names():
        settings = read_entry(name).settings
        optimization = settings["optimization"]
        decisive = str([settings["losses"], *map(optimization.get, ("overrides", "scheduler"))])
        if "losses.MarginLoss" not in decisive or decisive in found:
            continue
        found.add(decisive)
        run = parse([f"--recipe={name}"]).experiment
        model = EmbeddingModel(nn.Identity(), EmbeddingHead(4, 8, attention=VEMAttention))
        optimizer, _ = build_optimizer(run.optimization, model, build_loss(run, model, 3))
        (beta,) = (group for group in optimizer.param_groups if group["name"].startswith("loss"))
        assert (beta["max_lr"] if run.optimization.scheduler else beta["lr"]) == 5e-4, name
        assert beta["weight_decay"] == 0, name
    assert found


@pytest.mark.parametrize(
    ("batch_norm", "statistics_move", "weights_train"),
    [("train", True, True), ("frozen_statistics", False, True), ("frozen", False, False)],
)
def test_batch_norm_can_be_frozen(batch_norm, statistics_move, weights_train):
    run = parse([f"--model.batch_norm={batch_norm}"]).experiment
    model = build_model(run.model, run.data)
    norms = batch_norms(model.eval().train())
    assert norms and all(norm.training == statistics_move for norm in norms)
    assert all(p.requires_grad == weights_train for norm in norms for p in norm.parameters())
