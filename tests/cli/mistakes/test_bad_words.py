"""Words that a command cannot take: one line, its exit code, and nothing started or written."""

import shlex
from pathlib import Path

import pytest

from firecaffe.compression import fcz
from firecaffe.training.coded import describe, tensors_of
from firecaffe.training.load import load_run
from tests.cli.mistakes.line import GOOD, error_of, train_here

FILES = {
    "r.toml": GOOD,
    "large.toml": GOOD.replace("= 8", "= 16").replace("= 2", "= 16").replace("= 1\n", "= 64\n"),
    "weights.toml": GOOD.replace('"lenet"', '"lenet"\nweights = "run"'),
    "layer.toml": '[[rounds]]\n[rounds.prune]\nkeep = { "fc*" = 0.1 }\n',
    "zero.toml": '[[rounds]]\n[rounds.prune]\nkeep = { "*" = 0.0 }\n',
    "bits.toml": '[[rounds]]\n[rounds.share]\nbits = { "*" = 17 }\n',
    "low.toml": "[low_rank]\nrank = { ip2 = 99 }\n"
    '[[rounds]]\n[rounds.prune]\nkeep = { "*" = 0.1 }\n',
    "again.toml": '[[rounds]]\nname = "again"\n',
    "result.json": "{}",
    "half/recipe.toml": GOOD,
    "there.toml": "mine",
    "there.html": "mine",
}

ALONE = [
    ("trian", 2, "mean train?"),
    ("help trian", 2, "mean train?"),
    ("help train dta", 2, "mean data?"),
    ("help compare data", 2, "compare takes no recipe"),
    ("synchrony", 2, "'synchrony'"),
]

WRITTEN = [
    ("tune large.toml --global-batch-size 64 --write there.toml", 8, "--overwrite"),
    ("plan nin_small --runs run --write there.toml", 8, "--overwrite"),
    ("plan nin_small --html there.html", 8, "--overwrite"),
    ("check --write there.toml", 8, "--overwrite"),
    ("bench step --model lenet --write there.toml", 8, "--overwrite"),
    ("bench data photos --write there.toml", 8, "--overwrite"),
    ("compare a b --by recipe --html there.html", 8, "--overwrite"),
    ("compare run --html nowhere/x.html", 8, "--html nowhere/x.html: there is no folder nowhere"),
    ("compare run --html x.txt", 2, "must end in .html"),
    ("compare run half/../run", 2, "is given 2 times; a run counts once"),
    ("export run --to safetensors --out there.toml", 2, "there.toml"),
]

PLAN = [
    ("--model googlenet --cluster atlantis", 2, "no cluster 'atlantis'"),
    ("--model nonet", 2, "no network is called 'nonet'"),
    ("--model lenet --workers 0", 2, "--workers is 0"),
    ("--model lenet --micro-batch-size 0", 2, "at least 1"),
    ("--model lenet --workers many", 2, "--workers is 'many'"),
    ("nin_small --workers 64", 2, "only 8 micro-batches"),
    ("--compare a.toml b.toml --global-batch-size 8", 2, "train.global_batch_size"),
    ("nin_small --global-batch-size 8", 2, "--train.global_batch_size"),
    ("nin_small --exchange.compressor threshold", 2, "exchange.compressor is 'threshold'"),
    ("--train.steps 3 --model lenet", 2, "--train.steps is a setting of a recipe"),
    ("--model lenet --exchanges smoke", 2, "--exchanges: no exchange 'smoke'"),
    ("--model lenet --cluster dgx-a100 --workers 12 --exchanges hierarchical(tree,ring)", 2,
     "--workers: 12 ranks do not fill nodes of 8"),
    ("--model lenet --compressors zip", 2, "no 'zip'"),
    ("--model lenet --micro-batch-size 7 --global-batch-size 256", 2, "must be a multiple"),
    ("--model vgg19 --cluster titan --global-batch-size 512 --micro-batch-size 128", 2,
     "has 6 GB; use smaller micro-batches"),
    ("nin_small --model lenet", 2, "--model has no effect beside a recipe"),
    ("nin_small --args {a=1}", 2, "--args has no effect beside a recipe"),
    ("nin_small --workers ''", 2, "--workers is empty"),
    ("nin_small --ways=", 2, "--ways is empty"),
    ("nin_small --cluster r.toml", 2, "a recipe; expected a file that describes a cluster"),
    ("", 2, "give a recipe, --model or --compare"),
    ("none.toml", 2, "No such file"),
    ("nin_small --cluster none.toml", 2, "No such file"),
    ("nin_small --plot plan.html", 2, "must end in .png"),
    ("--model lenet --device a1000", 2, "--device is 'a1000'; there are a10, a100"),
    ("--model lenet --device a100 --links fast", 2, "--links is 'fast'; it must be rates"),
    ("--model lenet --links 10", 2, "--links has no effect beside a cluster"),
    ("--model lenet --device a100 --all", 2, "--all has no effect beside --device"),
    ("nin_small --device a100 --measure", 2, "--measure has no effect beside --device"),
    ("--model lenet --measure", 2, "--measure goes with a recipe"),
    ("nin_small --precision fp32 --measure", 2, "--precision has no effect beside --measure"),
    ("nin_small --cluster titan --precision bf16", 2, "has no bfloat16"),
    ("--compare r.toml r.toml --html plan.html", 2, "--compare has no effect beside --html"),
    ("nin_small --epochs 64=10", 2, "--epochs: 1 batch with known epochs"),
    ("nin_small --epochs 64:10,128:11", 2, "must be batches and their epochs"),
    ("nin_small --noise-scale 64", 2, "--noise-scale goes with --epochs"),
    ("nin_small --ways columns", 2, "--ways: no 'columns'; there are all, data,"),
    ("nin_small --workers 1 --ways all", 2, "--ways plans for 2 to 512 workers; found 1"),
    ("--model lenet --fcz r.toml", 4, "no .fcz file"),
]  # fmt: skip

BENCH = [
    ("", 2, "`bench exchange`"),
    ("network", 2, "'network'"),
    ("exchange --exchanges rign", 2, "'rign'"),
    ("exchange --exchanges hierarchical(ring,tree)", 2, "inner is 'ring'"),
    ("exchange --compressors int9", 2, "'int9'"),
    ("exchange -b 8KB", 2, "-b is '8KB'"),
    ("exchange -e 10", 2, "-e is '10'; it must be bytes, a multiple of 4"),
    ("exchange -b 1M -e 1K", 2, "-e is 1024"),
    ("exchange -e 8192G --device cpu", 2, "-e would take"),
    ("exchange -f 1", 2, "-f is 1"),
    ("exchange -f 1.5", 2, "--stepfactor is 1.5; it must be a whole number"),
    ("exchange --link 25GB", 2, "--link is '25GB'"),
    ("exchange --device tpu", 2, "--device is 'tpu'"),
    ("exchange --nproc-per-node 1", 2, "--nproc-per-node is 1"),
    ("exchange --nproc-per-node 1025", 2, "1025; it must be at most 1024"),
    ("exchange -n 0", 2, "-n is 0"),
    ("exchange --nproc-per-node 0", 2, "--nproc-per-node is 0"),
    ("exchange --compact", 2, "--compact"),
    ("exchange --master-port 99999999", 6, "--master-port"),
    ("data nowhere", 3, "nowhere: there is no such file or folder"),
    ("data x --crop 999", 2, "--resize at least --crop"),
    ("data x --write a.txt", 2, "--write is a.txt; it must end in .toml"),
]

SCHEDULE = [
    ("", 2, "exchange"),
    ("tree", 2, "workers"),
    ("rign 4", 2, "no exchange 'rign'"),
    ("native 4", 2, "has no schedule"),
    ("hierarchical(tree,rign) 4", 2, "outer is 'rign'"),
    ("hierarchical(tree,native) 4", 2, "outer is 'native'"),
    ("hierarchical(tree,ring) 7 --ranks-per-node 2", 2, "7 ranks do not fill nodes of 2"),
    ("tree 4 --ranks-per-node 2", 2, "--ranks-per-node is 2"),
    ("ring 4 --ranks-per-node 2 --shared-memory", 2, "--shared-memory: ring"),
    ("ring 4 --kind broadcast --ranks-per-node 2 --shared-memory", 2, "broadcast"),
    ("hierarchical(tree,tree) 4 --ranks-per-node 0", 2, "--ranks-per-node is 0"),
    ("tree 4 --elements -1", 2, "--elements is -1"),
    ("fold 4 --shared-memory", 2, "fold"),
    ("tree 4 --draw --json", 2, "--draw"),
    ("tree 1025", 2, "WORKERS is 1025; it must be 1 to 1024"),
    ("tree 0", 2, "WORKERS is 0; it must be 1 to 1024"),
    ("tree four", 2, "WORKERS is four; it must be a whole number"),
    ("tree 4 --color", 2, "--color"),
]

EVALUATE = [
    ("", 2, "one run"),
    ("nowhere", 8, "nowhere"),
    ("run --solver.base_lr 1", 2, "solver.base_lr"),
    ("run --nproc-per-node 0", 2, "--nproc-per-node is 0"),
    ("run --best", 4, "checkpoint.best"),
    ("run --data.name folder --data.path /nowhere", 3, "/nowhere"),
    ("net.fcz --best", 2, "best is asked of a run's folder"),
    ("net.fcz --train.steps 3", 2, "--train.steps has no effect"),
    ("cut.fcz", 4, "cut.fcz: no .fcz file, or damaged: it has"),
]

PREDICT = [
    ("run nowhere.png", 3, "nowhere.png"),
    ("run --top 0", 2, "--top is 0"),
    ("run --out masks", 2, "--out"),
    ("run --csv /nowhere/table.csv", 8, "/nowhere"),
]

EXPORT = [
    ("run", 2, "--to"),
    ("run --to caffe", 2, "safetensors"),
    ("run --to safetensors --out net.pt", 2, "net.pt"),
    ("cut.fcz --to safetensors", 4, "cut.fcz: no .fcz file, or damaged: it has"),
]

UNPACK = [
    ("", 2, "unpack takes one file, found none"),
    ("a b", 2, "unpack takes one file, found a and b"),
    ("none.fcz", 4, "none.fcz: No such file"),
    ("cut.fcz", 4, "cut.fcz: no .fcz file, or damaged: it has"),
    ("net.fcz --to x.pt", 2, "must end in .safetensors"),
]

PACK = [
    ("", 2, "pack takes SOURCE and DEST; found nothing"),
    ("nowhere x", 3, "nowhere: there is no such file or folder"),
    ("a b --shard-size big", 2, "--shard-size is 'big'; it must be as 256MB"),
    ("a b --quality 200", 2, "--quality is 200; it must be 1 to 100"),
    ("a --verify b", 2, "pack takes SOURCE and DEST; or --verify DEST"),
    ("--info nowhere", 3, "nowhere/dataset.json: cannot be read, No such file"),
]

VERIFY = [
    ("r.toml --nproc-per-node 1", 2, "--nproc-per-node"),
    ("r.toml --nproc-per-node 2,2", 2, "--nproc-per-node"),
    ("r.toml --nproc-per-node 1,x", 2, "--nproc-per-node"),
    ("r.toml --nproc-per-node 1,9", 2, "9 ranks"),
    ("r.toml --synchrony.mode stale --synchrony.clock simulated", 2, "stale gives other results"),
    ("r.toml --synchrony.mode local --synchrony.local_steps 1 --synchrony.replicas 2"
     " --nproc-per-node 1,3", 2, "replicas is 2 on 3 workers"),
    ("run --nproc-per-node 1,2", 2, "--nproc-per-node: verify RUN trains on one worker"),
    ("run --steps 0", 2, "--steps is 0; it must be at least 1"),
    ("run --train.seed 3", 2, "--train.seed has no effect on verify"),
    ("half/..", 8, "no recipe.toml; this is no run folder"),
]  # fmt: skip

REPLAY = [
    ("", 2, "replay"),
    ("none", 8, "none"),
    ("run", 8, "synchrony.mode"),
]

CHECK = [
    ("--write cluster.txt", 2, "--write"),
    ("r.toml --nproc-per-node 3 --parallel.stages [ip1]", 2, "3 workers with 2 stages"),
    ("r.toml --synchrony.mode backup --synchrony.backup_workers 2 --nnodes 1:3", 2,
     "--nnodes 1:3 may come to 2 hosts"),
]  # fmt: skip

TUNE = [
    ("", 2, "--global-batch-size is missing"),
    ("--global-batch-size 24", 2, "expected a multiple of micro_batch_size, 16"),
    ("--global-batch-size 128", 2, "leaves 8 steps of training; expected at least 16"),
    ("--global-batch-size 64 --solvers adam", 2, "no rule says a rate"),
    ("--global-batch-size 64 --against nowhere", 8, "there is no run"),
    ("--global-batch-size 64 --synchrony.mode stale --synchrony.clock simulated", 2,
     "synchrony.mode is stale, whose updates are not"),
    ("--global-batch-size 64 --seeds 0", 2, "--seeds is 0"),
    ("--global-batch-size 64 --budget 0", 2, "--budget is 0; it must be more than"),
    ("--global-batch-size 64 --solver.base_lr 0", 2, "solver.base_lr is 0"),
    ("--global-batch-size 64 --write no/x.toml", 8, "there is no folder no"),
    ("--global-batch-size 64 --nproc-per-node 2", 2, "2 ranks but only 1"),
]  # fmt: skip

COMPRESS = [
    ("none", 8, "there is no run"),
    ("half", 8, "half: has not finished; firecaffe train"),
    ("r.toml", 2, "model.weights is empty; compress takes a finished run"),
    ("weights.toml --target 40x", 2, "chooses by held-out training samples, and the run has none"),
    ("run --target forty", 2, "--target is 'forty'; expected a ratio (40x)"),
    ("run --target 10MB", 2, "the network's weights are 1,724,320 bytes as"),
    ("run --target 9x --scheme again.toml", 2, "scheme again neither prunes nor shares"),
    ("run --scheme bst", 2, "--scheme is 'bst'; there are best, deep_compression"),
    ("run --scheme none.toml", 2, "--scheme none.toml: No such file"),
    ("run --scheme layer.toml", 2, "prune.keep has 'fc*', which no layer with weights match"),
    ("run --scheme zero.toml", 2, "round 1-round: prune.keep '*' is 0.0; it must be"),
    ("run --scheme bits.toml", 2, "share.bits '*' is 17; it must be 1 to 16"),
    ("run --scheme low.toml", 2, "scheme low: model.low_rank of ip2 is 99; it must be"),
    ("run --out net.zip", 2, "--out is net.zip; it must end in .fcz"),
    ("run --out no/net.fcz", 8, "--out no/net.fcz: there is no folder no"),
    ("run --out result.fcz", 8, "--out result.fcz with the record result.json: exists already"),
    ("run --out result.fcz --overwrite", 8, "with the record result.json: exists already"),
    ("run --plot x.gif", 2, "--plot is x.gif; it must end in .png or .html"),
    ("run --nproc-per-node 0", 2, "--nproc-per-node is 0; it must be at least 1"),
    ("run --nproc-per-node 5", 2, "5 ranks but only 4 micro-batches"),
    ("run --solver.base_lr 1", 2, "has no effect on compress: the run is trained already"),
    ("run --best", 2, "checkpoint.best = true and train.eval_every"),
]

COMMANDS = {
    "plan": PLAN,
    "bench": BENCH,
    "schedule": SCHEDULE,
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "export": EXPORT,
    "unpack": UNPACK,
    "pack": PACK,
    "verify": VERIFY,
    "replay": REPLAY,
    "check": CHECK,
    "tune large.toml": TUNE,
    "compress": COMPRESS,
}
LINES = [
    *ALONE,
    *WRITTEN,
    *(
        (f"{start} {line}", code, said)
        for start, rows in COMMANDS.items()
        for line, code, said in rows
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, its network as a file, and what else the lines name."""
    folder = tmp_path_factory.mktemp("words")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    trained = load_run(train_here(folder, "--data.hold_out=0.1"))
    file = folder / "net.fcz"
    fcz.write(file, tensors_of(trained.model), describe(trained.recipe, trained.about))
    (folder / "cut.fcz").write_bytes(file.read_bytes()[:-5])
    return folder


@pytest.mark.parametrize(("line", "code", "said"), LINES, ids=[line for line, *_ in LINES])
def test_one_line_and_nothing_else(
    line: str,
    code: int,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    exit_code, error = error_of(capsys, shlex.split(line))
    assert (exit_code, said in error) == (code, True), error
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
