"""Every mistake in a run's description ends in one clear line, before anything is written."""

from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import losses, miners

from benchmarks.building.class_paths import build
from benchmarks.building.network import batch_norms, build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.run import main
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Model
from benchmarks.settings.recipe_files import dump, recipe_names
from pml_regularizers import HORDELoss, ScheduledLosses

HORDE = "pml_regularizers.HORDELoss"
PML = "pytorch_metric_learning"
RAMP = "{class_path: pml_regularizers.LinearRamp, init_args: {start: 0.0, end: .nan, steps: 9}}"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = {
    "unknown option": (["--data.batchsize=10"], "data.batchsize"),
    "unknown key": (["--config=c.yaml"], "batchsize", "data: {batchsize: 10}"),
    "unknown top-level key": (["--config=c.yaml"], "epochs", "epochs: 10"),
    "wrong type": (["--optimization.learning_rate=fast"], "fast"),
    "wrong type in file": (["--config=c.yaml"], "many", "optimization: {steps: many}"),
    "wrong choice": (["--data.dataset=birds"], "birds"),
    "missing file": (["--config=nowhere.yaml"], "nowhere.yaml"),
    "broken file": (["--config=c.yaml"], "c.yaml", "data: [1"),
    "not a mapping": (["--config=c.yaml"], "expected a mapping", "- 1"),
    "key twice": (["--config=c.yaml"], "'seed' appears twice", "seed: 1\nseed: 2"),
    "key twice in a file of a group": (
        ["--data", "c.yaml"],
        "error: c.yaml: not valid YAML: key 'fold' appears twice: line 1, column 1",
        "fold: 0\nfold: 1",
    ),
    "wrong value in a file of a group": (
        ["--data=c.yaml"],
        "error: data.fold: expected an integer, got 'x'",
        "fold: x",
    ),
    "number of a group": (["--data=5"], "error: data: expected a mapping of settings, got 5"),
    "missing file of a group": (["--data", "nowhere.yaml"], "error: nowhere.yaml: cannot be read"),
    "broken text of a group": (["--data={fold: 1"], "error: --data: "),
    "no integer": (["--data.fold=1.5"], "error: data.fold: expected an integer, got '1.5'"),
    "a number that no float holds": (
        ["--config=c.yaml"],
        "optimization.learning_rate: expected a number, got one of more than 308 digits",
        f"optimization: {{learning_rate: {10**400}}}",
    ),
    "an option that no float holds": (
        ["--optimization.learning_rate", f"-{10**400}"],
        "--optimization.learning_rate: expected a number, got one of more than 308 digits",
    ),
    "no number": (
        ["--optimization.learning_rate=x"],
        "error: optimization.learning_rate: expected a number, got 'x'",
    ),
    "unknown recipe": (["--recipe=glyphs/demo/nothing"], "binomial_horde"),
    "unknown table": (["--recipe=nobody/table9/row"], "glyphs/demo"),
    "unknown trunk": (["--model.trunk=resnet5000"], "resnet5000"),
    "unknown trunk argument": (["--model.trunk_args={output_strid: 8}"], "output_strid"),
    "trunk argument of ours": (["--model.trunk_args={num_classes: 8}"], "num_classes"),
    "batch": (["--data.batch_size=81"], "data.batch_size"),
    "too small": (["--optimization.steps=0"], "optimization.steps"),
    "stage": (
        ["--config=c.yaml"],
        "data.stage: cub has no stages",
        "data: {dataset: cub, stage: pretraining}",
    ),
    "no weights in a folder": (
        ["--model.weights=."],
        "model.weights: . holds no .safetensors file",
    ),
    "recall": (["--evaluation.recall_at=[]"], "evaluation.recall_at"),
    "recall twice": (["--evaluation.recall_at=[1, 2, 1]"], "evaluation.recall_at: expected each K"),
    "huge recall": (
        [f"--evaluation.recall_at=[{10**30}]"],
        "evaluation.recall_at: ",
    ),
    "huge test batch": ([f"--evaluation.batch_size={10**30}"], "evaluation.batch_size"),
    "no UTF-8": (["--label=\udcff"], "--label=\\udcff': is not UTF-8"),
    "huge selection": ([f"--data.train_classes={10**30}"], "data.train_classes: expected a number"),
    "huge interval": ([f"--checkpoint_every={10**400}"], "checkpoint_every"),
    "huge image": (
        ["--data.image_size=100000"],
        "data.image_size: expected a number >=8 and <32768",
    ),
    "endless ramp": (
        [f"--losses=[{{weight: {RAMP}, loss: {{class_path: {PML}.losses.ContrastiveLoss}}}}]"],
        "end: expected a finite number, got nan",
    ),
    "temperature": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.NTXentLoss, init_args: {{temperature: .nan}}}}}}]"
        ],
        "losses: a trial step failed: ValueError: the loss is nan",
    ),
    "no losses": (["--losses=[]"], "losses"),
    "a term of the recipe's": (["--losses=[{}]"], "expected {loss: ..., weight: ...}, got {}"),
    "terms of the recipe's": (
        ["--recipe=glyphs/compare/binomial_energy_confusion", "--losses=[{}, {}]"],
        "expected {loss: ..., weight: ...}, got {}",
    ),
    "a weight alone": (["--config=c.yaml"], "got {'weight': 2}", "losses: [{weight: 2}]"),
    "a term of more": (["--losses=[{loss: {class_path: x.Y}, wieght: 2}]"], "'wieght': 2}"),
    "a class for a term": (["--losses=[{class_path: nowhere.Loss}]"], "expected {loss: ..."),
    "weight of null": (["--losses=[{loss: {class_path: x.Y}, weight: null}]"], "got None"),
    "weight too long": (
        [f"--losses=[{{loss: {{class_path: x.Y}}, weight: 1{400 * '0'}}}]"],
        "finite",
    ),
    "not a loss spec": (["--losses=[{loss: {path: x}}]"], "losses[0].loss"),
    "unknown class": (
        [f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastLoss}}}}]"],
        "losses[0].loss.class_path",
    ),
    "unknown argument": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: {{pos_margn: 1}}}}}}]"
        ],
        "losses[0].loss.init_args.pos_margn",
    ),
    "unknown argument inside": (
        [
            f"--losses=[{{loss: {{class_path: {HORDE}, init_args: {{loss: "
            f"{{class_path: {PML}.losses.ContrastiveLoss, init_args: {{pos_margn: 1}}}}}}}}}}]"
        ],
        "losses[0].loss.init_args.loss.init_args.pos_margn",
    ),
    "unknown class inside": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: "
            f"{{distance: {{class_path: {PML}.distances.CosineSim}}}}}}}}]"
        ],
        "losses[0].loss.init_args.distance.class_path",
    ),
    "untyped argument": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: {{pos_margin: abc}}}}}}]"
        ],
        "pos_margin: expected int",
    ),
    "typed argument": (
        [
            f"--losses=[{{loss: {{class_path: {HORDE}, init_args: {{order: five, loss: "
            f"{{class_path: {PML}.losses.ContrastiveLoss}}}}}}}}]"
        ],
        "order",
    ),
    "refused by the class": (
        [
            f"--losses=[{{loss: {{class_path: {HORDE}, init_args: {{order: 1, loss: "
            f"{{class_path: {PML}.losses.ContrastiveLoss}}}}}}}}]"
        ],
        "order: expected at least 2, got 1",
    ),
    "missing argument": (
        [f"--losses=[{{loss: {{class_path: {HORDE}}}}}]"],
        "losses[0].loss",
    ),
    "argument of ours": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ArcFaceLoss, init_args: {{num_classes: 5}}}}}}]"
        ],
        "losses[0].loss.init_args.num_classes: follows from",
    ),
    "not a loss": (
        [f"--losses=[{{loss: {{class_path: {PML}.utils.inference.FaissKNN}}}}]"],
        "losses[0].loss.class_path: expected a loss",
    ),
    "optimizer": (
        ["--optimization.optimizer={class_path: torch.optim.Adam, init_args: {weight_deca: 1}}"],
        "optimization.optimizer.init_args.weight_deca",
    ),
    "scheduler": (
        ["--optimization.scheduler={class_path: torch.optim.lr_scheduler.OneCycle}"],
        "optimization.scheduler.class_path",
    ),
    "null": (["--config=c.yaml"], "seed: expected a value, got null", "seed: null"),
    "null inside": (["--config=c.yaml"], "evaluation.recall_at: ", "evaluation: {recall_at: null}"),
    "null group": (["--config=c.yaml"], "model", "model: null"),
    "alias of itself": (["--config=c.yaml"], "a", "a: &x [*x]"),
    "recipe in a file": (["--config=c.yaml"], "recipe: belongs", "recipe: nonsense"),
    "abbreviation": (["--see=3"], "see"),
    "seed": (["--seed=1180591620717411303424"], "seed"),
    "negative clip": (["--optimization.max_gradient_norm=-1"], "max_gradient_norm"),
    "schedule": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss}}, weight: {{class_path: "
            "pml_regularizers.LinearRamp, init_args: {start: 0, end: 1, step: 4}}}]"
        ],
        "losses[0].weight.init_args.step",
    ),
    "no schedule": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss}}, weight: {{class_path: "
            f"{PML}.distances.LpDistance}}}}]"
        ],
        "losses[0].weight.class_path: expected a schedule",
    ),
    "attention": (
        [
            "--model.attention={class_path: pml_regularizers.VEMAttention, init_args: {num_features: 3}}"
        ],
        "model.attention.init_args.num_features: follows",
    ),
    "one term": (
        ["--diagnose_every=1"],
        "diagnose_every: a trial step failed: ValueError: loss: expected a sum",
    ),
    "overrides": (
        ["--optimization.overrides={model.head.fcc: {lr: 1}}"],
        "optimization.overrides: no trained parameter is at model.head.fcc",
    ),
    "overrides without settings": (
        ["--optimization.overrides={model.head.fc: {}}"],
        "optimization.overrides.model.head.fc: expected settings",
    ),
    "overrides of nothing": (
        ["--optimization.overrides={model.head.fc: {learning_rate: 1}}"],
        "optimization.overrides.model.head.fc.learning_rate: Adam has no such setting",
    ),
    "overrides with dots": (
        ["--optimization.overrides.model.head.fc.lr=1e-3"],
        "optimization.overrides.model.head.fc.lr: Adam has no such setting",
    ),
    "rate of a part": (
        ["--optimization.overrides={model.head.fc: {lr: fast}}"],
        "optimization.overrides.model.head.fc.lr: expected a positive number, got fast",
    ),
    "pretrained weights of ours": (
        ["--model.trunk=bn_inception", "--model.trunk_args={pretrained: true}"],
        "random init; --model.weights FILE loads them from a file",
    ),
    "batch_norm": (["--model.batch_norm=off"], "frozen_statistics"),
    "missing weights": (["--model.weights=nowhere.pth"], "model.weights: nowhere.pth"),
    "weights that are none": (["--model.weights=c.yaml"], "model.weights: c.yaml", "no weights"),
    "fold": (["--data.split=validation", "--data.fold=4"], "data.fold: expected 0 to 3, one of"),
    "folds": (["--data.folds=1"], "data.folds: expected a number >=2 and"),
    "resize of glyphs": (["--data.resize=40"], "data.resize: Glyphs has its own"),
    "test classes of glyphs": (["--data.test_classes=0.5"], "data.test_classes: glyphs has"),
    "levels of glyphs": (["--data.class_level=1"], "data.class_level: glyphs has its published"),
    "folds of a stage": (
        ["--data.stage=fine_tuning", "--data.folds=2"],
        "data.folds: data.stage fine_tuning has its own classes",
    ),
    "no dataset": (["--data.dataset=cub", "--data.root=."], "data.root: "),
    "train_classes": (["--data.train_classes=1"], "data.train_classes: expected a number >=2"),
    "weight": (
        [f"--losses=[{{weight: .nan, loss: {{class_path: {PML}.losses.ContrastiveLoss}}}}]"],
        "weight",
    ),
    "calculator of lists": (
        [
            "--evaluation.accuracy_calculator={class_path: pml_regularizers.RankAccuracyCalculator, "
            "init_args: {return_per_class: true}}"
        ],
        "evaluation.accuracy_calculator.init_args.return_per_class: a run records one number",
    ),
    "passes without classes": (
        ["--data.samples_per_class=null", "--data.every_class=true"],
        "data.every_class: shuffled batches",
    ),
    "calculator": (
        ["--evaluation.accuracy_calculator={class_path: torch.nn.Identity}"],
        "evaluation.accuracy_calculator.class_path: expected an AccuracyCalculator",
    ),
    "bad path": (["--losses=[{loss: {class_path: .foo.Bar}}]"], "losses[0].loss.class_path"),
    "bool for a number": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: {{pos_margin: true}}}}}}]"
        ],
        "pos_margin: expected int",
    ),
    "loss that takes no labels": (
        ["--losses=[{loss: {class_path: torch.nn.Identity}}]"],
        "losses: a trial step failed",
    ),
    "argument of a wrong kind": (
        [
            f"--losses=[{{loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: {{distance: cosine}}}}}}]"
        ],
        "losses: a trial step failed",
    ),
    "no miner": (
        [f"--miner={{class_path: {PML}.losses.ContrastiveLoss}}"],
        "miner.class_path: expected a miner",
    ),
    "no optimizer": (
        ["--optimization.optimizer={class_path: torch.nn.Identity}"],
        "optimization.optimizer.class_path: expected an optimizer",
    ),
    "no scheduler": (
        ["--optimization.scheduler={class_path: torch.nn.Identity}"],
        "optimization.scheduler.class_path: expected a scheduler",
    ),
    "scheduler of another kind": (
        ["--optimization.scheduler={class_path: torch.optim.lr_scheduler.ReduceLROnPlateau}"],
        "optimization.scheduler",
    ),
    "root is a file": (["--data.root=c.yaml"], "data.root: c.yaml", "not: a folder"),
    "miner": ([f"--miner={{class_path: {PML}.nowhere.Miner}}"], "miner.class_path: cannot import"),
    "more than memory allows": (
        [
            f"--losses=[{{loss: {{class_path: {HORDE}, init_args: {{moment_dim: 100000000, loss: "
            f"{{class_path: {PML}.losses.ContrastiveLoss}}}}}}}}]"
        ],
        "losses",
    ),
    "HORDE on pooled features": (
        [
            "--model.trunk_args={global_pool: avg}",
            f"--losses=[{{loss: {{class_path: {HORDE}, init_args: {{loss: "
            f"{{class_path: {PML}.losses.ContrastiveLoss}}}}}}}}]",
        ],
        "model.trunk_args.global_pool: follows",
    ),
    "more images of a class than of a batch": (
        ["--data.samples_per_class=100"],
        "data.batch_size: expected a multiple of data.samples_per_class (100), got 80; 100 fits",
    ),
    "chosen by the test set": (
        ["--protocol=fair", "--evaluation.oracle=true"],
        "evaluation.oracle: protocol fair reads the test classes once",
    ),
    "never chosen": (
        ["--protocol=fair", "--evaluation.every=0"],
        "evaluation.every: protocol fair",
    ),
    "protocol": (["--protocol=best"], "protocol"),
    "oracle without points": (
        ["--evaluation.oracle=true", "--evaluation.every=0"],
        "evaluation.oracle: tests at every evaluation.every steps",
    ),
    "bound without parts": (["--evaluation.divergence=true"], "evaluation.divergence: compares"),
    "one part": (["--evaluation.parts=1"], "evaluation.parts: expected a number >=2"),
    "tracker": (["--trackers=[wandbb]"], "wandb"),
    "tracker that is not there": (["--trackers=[aim]"], "trackers: aim is not installed"),
    "stage of an ensemble": (
        ["--model.ensemble={stage: layer9}"],
        "model: test_resnet: stage: expected a module",
    ),
    "heads of an ensemble": (
        ["--model.ensemble={stage: layer1, num_heads: 7}"],
        "embedding_size: expected a multiple of num_heads=7",
    ),
    "ensemble and attention": (
        [
            "--model.ensemble={stage: layer1}",
            "--model.attention={class_path: pml_regularizers.VEMAttention}",
        ],
        "model.attention: an ensemble has its own head",
    ),
    "unknown key of an ensemble": (["--model.ensemble={stag: layer1}"], "stag"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(
    mistake: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected, *content = MISTAKES[mistake]
    if content:
        (empty / "c.yaml").write_text(content[0])
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert [path.name for path in empty.iterdir()] == (["c.yaml"] if content else [])


def test_a_file_of_a_group(empty: Path) -> None:
    """Takes its turn among the options."""
    (empty / "c.yaml").write_text("fold: 3\nfolds: 7")
    argv = ["--data.fold=2", "--data", "c.yaml", "--data={max_classes: 9}", "--data.folds=8"]
    data = parse(argv).experiment.data
    assert (data.fold, data.folds, data.max_classes) == (3, 8, 9)


def test_a_value_that_is_called_like_a_group(empty: Path) -> None:
    """`--data.root data` is what `make demo` passes on."""
    argv = ["--data.root", "data", "--label", "model", "--output", "model", "--seed", "3"]
    run = parse(argv).experiment
    assert (run.data.root, run.label, run.seed) == (Path("data"), "model", 3)
    assert run.output == Path("model")


def test_layers_override_each_other(empty: Path) -> None:
    (empty / "a.yaml").write_text("seed: 3\noptimization: {learning_rate: 1e-5, steps: 7}")
    (empty / "b.yaml").write_text("optimization: {steps: 8}")
    command = parse(
        ["--recipe=glyphs/demo/binomial_horde", "--config=a.yaml", "--config=b.yaml", "--seed=4"]
    )
    run = command.experiment
    assert run.label == "binomial deviance + HORDE"
    assert (run.seed, run.optimization.steps, run.optimization.learning_rate) == (4, 8, 1e-5)
    assert run.data.samples_per_class == 4
    assert run.output == Path("runs/glyphs-demo-binomial_horde-seed4")
    assert command.recipe == "glyphs/demo/binomial_horde"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--recipe=images/resnet50/binomial"], "images-resnet50-binomial"),
        (["--recipe=images/resnet50/binomial", "--data.root=p/shop"], "images-resnet50-binomial"),
        (
            ["--recipe=images/resnet50/binomial", "--data.root=p/shop", "--model.trunk=vit_tiny"],
            "shop-vit_tiny-binomial-deviance",
        ),
        (
            ["--recipe=images/resnet50/binomial", "--data.dataset=cub"],
            "cub-resnet50-binomial-deviance",
        ),
        (["--data.dataset=folder"], "data-test_resnet-binomial-deviance"),
        (["--label=mine + ../HORDE"], "glyphs-test_resnet-mine-..-HORDE"),
        (["--config=own.yaml"], "own"),
        (["--config=own.yaml", "--model.trunk=vit_tiny"], "glyphs-vit_tiny-mine"),
        (["--recipe=glyphs/demo/binomial", "--config=own.yaml"], "glyphs-resnet18-mine"),
    ],
)
def test_the_folder_is_named_after_what_is_run(argv: list[str], name: str, empty: Path) -> None:
    (empty / "own.yaml").write_text("{label: mine, model: {trunk: resnet18}}")
    assert parse([*argv, "--seed=2"]).experiment.output == Path(f"runs/{name}-seed2")


TERMS = [{"loss": {"class_path": "a.A"}}, {"loss": {"class_path": "b.B"}, "weight": 3.0}]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "layers", ["option", "file", "two files", "file and option", "two options"]
)
def test_a_list_replaces_the_one_before_it(layers: str, count: int, empty: Path) -> None:
    terms = TERMS[:count]
    others = [term | {"weight": 7.0} for term in terms]
    (empty / "a.yaml").write_text(
        dump({"losses": others if "two" in layers or "and" in layers else terms})
    )
    (empty / "b.yaml").write_text(dump({"losses": terms}))
    recipe, first, second = (
        "--recipe=glyphs/compare/binomial_energy_confusion",
        "--config=a.yaml",
        "--config=b.yaml",
    )
    option = f"--losses={terms}"
    argv = {
        "option": [option],
        "file": [first],
        "two files": [first, second],
        "file and option": [first, option],
        "two options": [f"--losses={others}", option],
    }[layers]
    found = parse([recipe, *argv]).config["losses"]
    assert found == [{"weight": 1.0} | term for term in terms]


def test_a_plus_appends_a_term() -> None:
    [first, second] = parse(["--losses+={loss: {class_path: a.A}}"]).config["losses"]
    assert first["loss"]["class_path"] == "pml_regularizers.BinomialDevianceLoss"
    assert second == {"loss": {"class_path": "a.A"}, "weight": 1.0}


def test_the_dumped_config_is_the_experiment(empty: Path) -> None:
    text = ["--label=1e5", "--miner={class_path: X, init_args: {text: '1.5e-3', number: 1e5}}"]
    first = parse(["--recipe=glyphs/demo/binomial_horde", "--seed=2", *text])
    assert first.config["miner"]["init_args"] == {"text": "1.5e-3", "number": 1e5}
    (empty / "again.yaml").write_text(dump(first.config))
    second = parse(["--config=again.yaml", "--output=x"])
    second.experiment.output = first.experiment.output
    assert second.experiment == first.experiment


def test_recipes_of_no_paper_can_be_built() -> None:
    """The recipes of the papers are in test_recipes.py."""
    names = [name for name in recipe_names() if name.startswith(("glyphs/", "images/"))]
    assert len(names) >= 10
    for name in names:
        run = parse([f"--recipe={name}"]).experiment
        run.model.trunk_args.pop("pretrained", None)
        run.model.weights = None
        with torch.device("meta"):
            model = build_model(run.model, run.data)
            build_loss(run, model, num_classes=5)


def test_seeds_and_folds_take_turns_in_a_folder_of_weights(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "SHA256SUMS").touch()
    runs = [parse([f"--model.weights={tmp_path}", f"--seed={s}", f"--data.fold={f}"]) for s, f in
            ((0, 0), (1, 0), (2, 0), (2, 3))]  # fmt: skip
    assert [run.experiment.model.weights.stem for run in runs] == ["a", "b", "a", "b"]
    assert {run.config["model"]["weights"] for run in runs} == {str(tmp_path)}


def test_a_recipe_finds_its_weights_from_anywhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = parse(["--recipe=glyphs/finetune/binomial", "--seed=1"]).experiment
    assert run.model.weights.is_file()
    build_model(run.model, run.data)


def test_builds_nested_classes_with_the_sizes_of_the_run() -> None:
    command = parse(
        [
            "--losses=[{loss: {class_path: pml_regularizers.HORDELoss, init_args: {order: 3, moment_dim: 16, "
            f"loss: {{class_path: {PML}.losses.ArcFaceLoss, init_args: {{margin: 20}}}}}}}}}}, "
            f"{{weight: 0.5, loss: {{class_path: {PML}.losses.ContrastiveLoss, init_args: {{distance: "
            f"{{class_path: {PML}.distances.CosineSimilarity}}, pos_margin: 1, neg_margin: 0}}}}}}]",
            f"--miner={{class_path: {PML}.miners.MultiSimilarityMiner}}",
        ]
    )
    model = build_model(Model(embedding_size=8), Data())
    loss = build_loss(command.experiment, model, num_classes=11)
    assert isinstance(loss.miner, miners.MultiSimilarityMiner)
    assert isinstance(loss.loss, ScheduledLosses)
    assert loss.loss.weights == {"HORDELoss": 1.0, "ContrastiveLoss": 0.5}
    horde, contrastive = loss.loss.losses.values()
    assert isinstance(horde, HORDELoss)
    assert horde.losses["order_3"].W.shape == (8, 11)
    assert horde.moments.in_channels == 96
    assert isinstance(contrastive.distance, losses.MultiSimilarityLoss().distance.__class__)
    embeddings = model(torch.randn(4, 1, 32, 32))
    assert loss(embeddings, torch.tensor([0, 0, 1, 1])).isfinite()


def test_builds_attention_kernels_schedules_and_their_optimizer_group() -> None:
    spec = "{class_path: pml_regularizers."
    run = parse(
        [
            f"--losses=[{{loss: {spec}BinomialDevianceLoss}}}}, {{loss: {spec}BinomialDevianceLoss}}, weight: 2}}, "
            f"{{loss: {spec}JRSRegularizer, init_args: {{kernels: {{pooled: {spec}GaussianKernel}}, "
            f"embeddings: {spec}LaplaceKernel}}}}}}}}, "
            f"weight: {spec}LinearRamp, init_args: {{start: 0.5, end: 1.5, steps: 4}}}}}}, "
            f"{{loss: {spec}VarianceRegularizer}}}}]",
            f"--model.attention={spec}VEMAttention, init_args: {{init: zeros}}}}",
        ]
    ).experiment
    model = build_model(run.model, Data())
    assert model.head.attention.init == "zeros"
    loss = build_loss(run, model, num_classes=3)
    assert list(loss.loss.losses) == [
        "BinomialDevianceLoss",
        "BinomialDevianceLoss_1",
        "JRSRegularizer",
        "VarianceRegularizer",
    ]
    labels = torch.tensor([0, 0, 1, 1])
    for weight in (0.5, 0.75):
        loss(model(torch.randn(4, 1, 32, 32)), labels)
        assert loss.loss.weights["JRSRegularizer"] == weight
    optimizer, _ = build_optimizer(run.optimization, model, loss)
    rates = {group["name"]: group["max_lr"] for group in optimizer.param_groups}
    assert rates == {"model": run.optimization.learning_rate, "model.head.attention": 1e-2}


def test_null_keeps_out_what_the_runner_would_fill_in() -> None:
    path = f"{PML}.losses.MarginLoss"
    beta = {"class_path": path, "init_args": {"learn_beta": True, "num_classes": None}}
    assert build(beta, "loss", num_classes=7).beta.shape == (1,)
    assert build({"class_path": path}, "loss", num_classes=7).beta.shape == (7,)


def test_parts_have_their_own_settings() -> None:
    run = parse(
        ["--optimization.overrides={model.head.fc: {lr: 1e-2, weight_decay: 0.5}}"]
    ).experiment
    model = build_model(run.model, run.data)
    loss = build_loss(run, model, num_classes=3)
    optimizer, _ = build_optimizer(run.optimization, model, loss)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert list(groups) == ["model", "model.head.fc"]
    assert groups["model.head.fc"]["max_lr"] == 1e-2
    assert groups["model.head.fc"]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("batch_norm", "statistics_move", "affine_moves"),
    [("train", True, True), ("frozen_statistics", False, True), ("frozen", False, False)],
)
def test_batch_norm_can_be_frozen(
    batch_norm: str, statistics_move: bool, affine_moves: bool
) -> None:
    run = parse([f"--model.batch_norm={batch_norm}"]).experiment
    model = build_model(run.model, run.data)
    loss = build_loss(run, model, num_classes=3)
    optimizer, _ = build_optimizer(run.optimization, model, loss)
    norms = batch_norms(model)
    assert len(norms) > 3
    before = [(norm.running_mean.clone(), norm.weight.detach().clone()) for norm in norms]
    assert all(norm.training == statistics_move for norm in norms)
    model.eval()
    model.train()
    loss(model(torch.randn(4, 1, 32, 32)), torch.tensor([0, 0, 1, 1])).backward()
    optimizer.step()
    moved = [
        (not torch.equal(norm.running_mean, mean), not torch.equal(norm.weight, weight))
        for norm, (mean, weight) in zip(norms, before, strict=True)
    ]
    statistics, affine = zip(*moved, strict=True)
    assert set(statistics) == {statistics_move}
    assert any(affine) == affine_moves  # not all: a branch that begins as zero has no gradient


def test_a_spec_with_stray_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="x: expected"):
        build({"class_path": f"{PML}.losses.ContrastiveLoss", "arguments": {}}, "x")


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--losess=1", "losses"),
        ("--data.batch_sise=3", "data.batch_size"),
        ("--data.batch-size=3", "data.batch_size"),
    ],
)
def test_a_misspelt_setting_is_answered_by_the_one_that_is_meant(
    argument: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    key, value = argument.removeprefix("--").split("=")
    *groups, name = key.split(".")
    file.write_text("".join(f"{group}:\n  " for group in groups) + f"{name}: {value}\n")
    for arguments in ([argument], [f"--config={file}"]):
        with pytest.raises(ConfigError, match=rf"; did you mean {meant}\?$"):
            parse(arguments)
    with pytest.raises(ConfigError, match="--help lists the settings"):
        parse(["--nothing_like_it=1"])
