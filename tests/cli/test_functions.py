"""Each function against its command on the same small run, in a script without a launcher.

The script also says what of its process a call has left otherwise than it was.
"""

import json
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import firecaffe
from firecaffe.api.import_and_pack import PackedFolder
from firecaffe.cli import function_of, main
from tests import typed

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
hold_out = 0.02
[train]
global_batch_size = 16
micro_batch_size = 8
steps = 32
eval_batch_size = 500
device = "cpu"
[solver]
base_lr = 0.01
[run]
tensorboard = false
"""

SCHEME = """
[[rounds]]
name = "share"
length = 0.1
[rounds.share]
bits = { "*" = 4 }
"""

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 4 } } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""

SERVED = (
    *("--synchrony.mode", "asynchronous", "--synchrony.clock", "simulated"),
    *("--solver.base_lr", "0.001"),
)

CALLS: dict[str, tuple[str, list[str]]] = {
    "evaluate": ("evaluate('run')", ["evaluate", "run", "--json"]),
    "evaluate on two": (
        "evaluate('run', nproc_per_node=2, replace={'train.eval_batch_size': 400})",
        ["evaluate", "run", "--train.eval_batch_size", "400", "--json"],
    ),
    "compare": ("compare(['run', 'again'])", ["compare", "run", "again", "--json"]),
    "compare by recipe": (
        "compare(['run', 'again'], by='recipe', band=1)",
        ["compare", "run", "again", "--by", "recipe", "--band", "1", "--json"],
    ),
    "explain": ("explain('run')", ["explain", "run", "--json"]),
    "plan": (
        "plan('small.toml', workers=[1, 2], exchanges=['ring', 'tree'])",
        ["plan", "small.toml", "--workers", "1,2", "--exchanges", "ring,tree", "--json"],
    ),
    "plan a model": (
        "plan(model='lenet', workers=2, micro_batch_size=4)",
        ["plan", "--model", "lenet", "--workers", "2", "--micro-batch-size", "4", "--json"],
    ),
    "tune": (
        "tune('small.toml', global_batch_size=32, budget=0.5, seeds=1, out='search')",
        [*("tune", "small.toml", "--global-batch-size", "32", "--budget", "0.5"),
         *("--seeds", "1", "--out", "search", "--json")],
    ),
    "compress": (
        "compress('run', scheme='mine.toml', out='small.fcz', overwrite=True)",
        [*("compress", "run", "--scheme", "mine.toml", "--out", "small.fcz", "--overwrite"),
         "--json"],
    ),
    "schedule": (
        "schedule('hierarchical(tree,ring)', 8, ranks_per_node=2, elements=4096)",
        [*("schedule", "hierarchical(tree,ring)", "8", "--ranks-per-node", "2"),
         *("--elements", "4096", "--json")],
    ),
    "profile": (
        "profile('lenet', batch_size=4)", ["profile", "lenet", "--batch-size", "4", "--json"]
    ),
    "profile in parallel": (
        "profile('lenet', batch_size=64, parallel=True, workers=4)",
        ["profile", "lenet", *("--batch-size", "64", "--parallel", "--workers", "4", "--json")],
    ),
}  # fmt: skip
"""Functions and commands with the same JSON."""

TEXTS = {
    "predict": ("predict('run', top=2)", ["predict", "run", "--top", "2"]),
    "export": (
        "export('run', 'safetensors', out='a.safetensors', overwrite=True)",
        [*("export", "run", "--to", "safetensors"), *("--out", "a.safetensors", "--overwrite")],
    ),
    "replay": ("replay('served')", ["replay", "served"]),
    "unpack": (
        "unpack('small.fcz', to='u.safetensors', overwrite=True)",
        ["unpack", "small.fcz", "--to", "u.safetensors", "--overwrite"],
    ),
    "import": (
        "import_caffe('net.prototxt', out='imported', overwrite=True)",
        ["import", "net.prototxt", "--out", "imported", "--overwrite"],
    ),
    "draw": ("schedule('ring', 4, draw=True)", ["schedule", "ring", "4", "--draw"]),
    "verify": ("verify('small.toml', steps=1)", ["verify", "small.toml", "--steps", "1"]),
    "verify a run": ("verify('run', steps=2)", ["verify", "run", "--steps", "2"]),
}
"""Functions and commands with the same text, for what the command has no JSON."""

CHECK = "check(nproc_per_node=2, write='measured.toml')"

PACK = "pack('images', 'packed', hold_out=0.5)"

MISTAKES = {
    "evaluate('nowhere')": ("RunError", "nowhere"),
    "evaluate(3)": ("RecipeError", "run"),
    "plan(model='lenet', epochs=[(64, 10)])": ("RecipeError", "epochs"),
    "compress('run', target=40)": ("RecipeError", "40"),
    "schedule('ring', 4, kind='sum')": ("RecipeError", "'sum'"),
    "profile(__import__('pathlib').Path('none.fcz'))": ("CheckpointError", "none.fcz"),
    "evaluate('run', nproc_per_node=0)": ("RecipeError", "nproc_per_node"),
    "evaluate('run', replace={'train.steps': 3})": ("RecipeError", "train.steps"),
    "evaluate('run', bset=True)": ("CallError", "best"),
    "predict('run', top=0)": ("RecipeError", "top"),
    "export('run', 'onxn')": ("RecipeError", "to"),
    "compare([])": ("RecipeError", "runs"),
    "compare('run', target=3.0)": ("RecipeError", "target"),
    "compare('run', baseline=3)": ("RecipeError", "baseline"),
    "explain('run', 3)": ("CallError", "run"),
    "plan()": ("RecipeError", "model"),
    "plan('small.toml', workers='one')": ("RecipeError", "workers"),
    "verify('small.toml', steps=0)": ("RecipeError", "steps"),
    "verify('small.toml', steps=10**11)": ("RecipeError", "steps is"),
    "verify('run', nproc_per_node=[1, 2])": ("RecipeError", "nproc_per_node"),
    "check(nproc_per_node=0)": ("RecipeError", "nproc_per_node"),
    "check(device='gpu')": ("RecipeError", "device"),
    "check('small.toml', model='lenet')": ("RecipeError", "model"),
    "plan('small.toml', workers=0)": ("RecipeError", "workers"),
    "plan('small.toml', global_batch_size=8)": ("RecipeError", "global_batch_size"),
    "plan('small.toml', workers=1, ways='all')": ("RecipeError", "ways"),
    "plan(compare='small.toml')": ("RecipeError", "compare"),
    "plan(model='lenet', args=3)": ("RecipeError", "args"),
    "plan(model='lenet', input=b'1x28x28')": ("RecipeError", "input"),
    "plan(model='lenet', micro_batch_size='8')": ("RecipeError", "micro_batch_size"),
    "verify('small.toml', layouts=['1', 'model=2'])": ("RecipeError", "layouts"),
    "verify('run', layouts=['1', 'data=2'])": ("RecipeError", "layouts"),
    "tune('small.toml', global_batch_size=32, against='nowhere')": ("RunError", "nowhere"),
    "tune('small.toml', global_batch_size=32, budget='8')": ("RecipeError", "budget"),
    "tune('small.toml', global_batch_size=0)": ("RecipeError", "global_batch_size"),
    "tune('small.toml', global_batch_size=32, out=3)": ("RecipeError", "out"),
    "tune('small.toml', global_batch_size=32, write=3)": ("RecipeError", "write"),
    "schedule('rnig', 4)": ("RecipeError", "ring"),
    "schedule('ring', 'four')": ("RecipeError", "workers"),
    "profile('lenet', workers=4)": ("RecipeError", "parallel"),
    "profile('resnet18', input='3x32x32')": ("RecipeError", "batch_size"),
    "replay('run')": ("RunError", "synchrony.mode"),
    "replay('run', to=3)": ("RecipeError", "to"),
    "unpack('nowhere.fcz')": ("CheckpointError", "nowhere.fcz"),
    "pack('images', 'packed2', shard_size='many')": ("RecipeError", "shard_size"),
    "pack('images', 'packed2', hold_out='half')": ("RecipeError", "hold_out"),
    "pack('images', 'packed2', channel_order='rbg')": ("RecipeError", "channel_order"),
    "schedule(3, 4)": ("RecipeError", "exchange"),
    "schedule('fold', 4, micro_batches='many')": ("RecipeError", "micro_batches"),
    "profile(3)": ("RecipeError", "model.name"),
    "profile('lenet', input=(1, 28, 28))": ("RecipeError", "input"),
    "plan(runs=['rates.toml'], html='page.html')": ("RecipeError", "html"),
    "plan(runs=['rates.toml'], workers=[4])": ("RecipeError", "workers"),
    "import_caffe('net.prototxt', root='nowhere')": ("RunError", "root"),
    "import_caffe('net.prototxt', root=3)": ("RecipeError", "root"),
    "import_caffe('net.prototxt', out=3)": ("RecipeError", "out"),
    "compress('small.toml')": ("RecipeError", "model.weights"),
    "compress('run', out=3)": ("RecipeError", "out"),
    "export('run', 'safetensors', out=3)": ("RecipeError", "out"),
    "bench_exchange(nproc_per_node=1)": ("RecipeError", "nproc_per_node"),
    "bench_exchange(exchanges=['rign'])": ("RecipeError", "exchanges"),
    "bench_exchange(shared_memory='no')": ("RecipeError", "shared_memory"),
    "bench_exchange(master_port='x')": ("RecipeError", "master_port"),
    "check(master_port='x')": ("RecipeError", "master_port"),
    "bench_exchange(minbytes=10)": ("RecipeError", "minbytes"),
    "bench_exchange(link=-1)": ("RecipeError", "link"),
    "bench_exchange(stepfactor=1.5)": ("RecipeError", "stepfactor"),
    "bench_step()": ("RecipeError", "model"),
    "bench_step('small.toml', model='lenet')": ("RecipeError", "model"),
    "bench_step(model='lenet', sizes='one')": ("RecipeError", "sizes"),
    "bench_step(model='lenet', cluster='cpu-host')": ("RecipeError", "write"),
    "bench_data('nowhere')": ("DataError", "nowhere"),
    "bench_data('images', crop=300)": ("RecipeError", "crop"),
    "bench_data(3)": ("RecipeError", "path"),
    "train('small.toml', model=NET)": ("RecipeError", "model=lambda: Linear("),
    "train('small.toml', train_set=3)": ("DataError", "test_set"),
}

SCRIPT = """
import json, logging, os, signal, sys, warnings
import matplotlib
import torch
import firecaffe

os.environ["MINE"] = "mine"
torch.set_num_threads(2)
torch.set_float32_matmul_precision("high")
torch.manual_seed(3)
NET = torch.nn.Linear(2, 2)
logging.getLogger("mine").setLevel(logging.DEBUG)
logging.disable(5)
warnings.filterwarnings("ignore", "of mine")
signal.signal(signal.SIGTERM, lambda *_: None)

def state():
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "random": torch.get_rng_state().tolist(),
        "logging": [logging.root.manager.disable, logging.root.level, list(logging.root.handlers)],
        "loggers": logging.getLogger("torch.distributed.elastic").propagate,
        "environment": dict(os.environ),
        "warnings": list(map(str, warnings.filters)),
        "signals": [str(signal.getsignal(n)) for n in (1, 2, 10, 12, 15)],
        "folder": os.getcwd(),
        "backend": matplotlib.get_backend(),
        "streams": [id(sys.stdout), id(sys.stderr)],
    }

def call(text):
    before = state()
    found = {}
    try:
        answer = eval(f"firecaffe.{text}")
        found["json"], found["text"] = answer.to_dict(), repr(answer)
        found["html"] = answer._repr_html_()
    except firecaffe.FirecaffeError as error:
        found["error"] = [type(error).__name__, str(error)]
    after = state()
    found["changed"] = [name for name in before if before[name] != after[name]]
    return found

import scipy.stats, torchmetrics  # these add filters of warnings where they are first imported
import firecaffe.api.train, firecaffe.api.cluster_check
import firecaffe.api.compressed_network, firecaffe.api.rate_search
calls = ["train('small.toml')", "train('small.toml', workers=1)"] + json.loads(sys.argv[1])
print(json.dumps({text: call(text) for text in calls}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and two runs of it."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "small.toml").write_text(RECIPE)
    (folder / "mine.toml").write_text(SCHEME)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "net.prototxt").write_text(NET)
    for number in range(4):
        path = folder / "images" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(path)
    for name, words in {"run": (), "again": (), "served": SERVED}.items():
        command = "train", "small.toml", "--run.folder", name, *words
        typed.firecaffe(*command, cwd=folder).check_returncode()
    return folder


@pytest.fixture(scope="module")
def called(folder: Path) -> dict[str, Any]:
    calls = [call for call, _ in (*CALLS.values(), *TEXTS.values())]
    done = typed.python("script.py", json.dumps([*calls, CHECK, PACK, *MISTAKES]), cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_function_has_the_json_of_its_command(
    name: str,
    folder: Path,
    called: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, command = CALLS[name]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(command) == (17 if name == "tune" else 0)
    assert called[call]["json"] == json.loads(capsys.readouterr().out)
    assert called[call]["text"]
    assert called[call]["html"].startswith("<pre")


@pytest.mark.parametrize("name", TEXTS)
def test_a_function_shows_the_text_of_its_command(
    name: str, folder: Path, called: dict[str, Any]
) -> None:
    call, command = TEXTS[name]
    done = typed.firecaffe(*command, cwd=folder)  # `verify` starts ranks, faster from there
    assert done.returncode == 0, done.stderr
    lines = called[call]["text"].splitlines()
    assert done.stdout.splitlines()[-len(lines) :] == lines
    json.dumps(called[call]["json"])


def test_check_measures_on_ranks_of_its_own(folder: Path, called: dict[str, Any]) -> None:
    found = called[CHECK]
    assert [rank["rank"] for rank in found["json"]["ranks"]] == [0, 1]
    assert "wrote measured.toml" in found["text"]
    assert (folder / "measured.toml").is_file()


def test_a_packed_set_is_read_and_verified_from_python(
    folder: Path, called: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    packed = PackedFolder.read(folder / "packed").counted()
    found = called[PACK]["json"]["parts"]
    assert {name: part["images"] for name, part in found.items()} == {"train": 2, "test": 2}
    assert packed.to_dict()["parts"]["train"]["images_by_class"] == {"a": 1, "b": 1}
    assert main(["pack", "--info", str(folder / "packed")]) == 0
    assert capfd.readouterr().out.splitlines() == repr(packed).splitlines()
    assert main(["pack", "--verify", str(folder / "packed")]) == 0
    assert capfd.readouterr().out == f"{packed.verify()}\n"


@pytest.mark.parametrize("call", MISTAKES)
def test_a_mistake_is_one_line(call: str, called: dict[str, Any]) -> None:
    kind, word = MISTAKES[call]
    name, line = called[call]["error"]
    assert (name, len(line.splitlines())) == (kind, 1)
    assert word in line
    assert "--" not in line


def test_a_call_leaves_the_process_as_it_was(called: dict[str, Any]) -> None:
    assert {call: found["changed"] for call, found in called.items() if found["changed"]} == {}
    results = [called[call] for call in ("train('small.toml')", "train('small.toml', workers=1)")]
    assert results[0]["json"]["weights_sha256"] == results[1]["json"]["weights_sha256"]
    for result in results:
        assert result["json"]["weights_sha256"][:12] in result["text"]
        assert len(result["text"].splitlines()) < 8


COMMANDS = (
    *("check", "compare", "compress", "evaluate", "explain"),
    *("export", "import_caffe", "pack", "plan", "predict", "profile"),
    *("replay", "schedule", "tune", "unpack", "verify"),
)

OTHER_DEFAULT = {
    "verify": {"nproc_per_node"},
    **{key: {"args"} for key in ("plan", "check", "profile")},
}
"""Options whose default a function writes as None."""

NEEDED = {"tune": {"global_batch_size"}, "export": {"to"}}
"""Options that have to be given."""

METHODS = {"pack": ("verify", "info")}
"""Options that are methods of what the function returns."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_word_of_a_command_is_one_of_its_function_with_its_default(name: str) -> None:
    words = signature(getattr(firecaffe, name)).parameters
    for option in function_of("make_parser", name.removesuffix("_caffe"))().own:
        if option.dest in ("help", "json") or option.dest in METHODS.get(name, ()):
            continue
        if not option.option_strings:  # the command's parser asks for it, or takes none
            continue
        default = words[option.dest].default
        if option.dest in NEEDED.get(name, ()):
            assert default is Parameter.empty
        elif option.dest in OTHER_DEFAULT.get(name, ()):
            assert default is None
        else:
            expected = () if option.default == [] else option.default
            # A number may be written as one where a command has text, as 1 host of MIN:MAX.
            assert default == expected or str(default) == expected, option.dest
