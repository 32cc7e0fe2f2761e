"""Commands as typed that are refused in one sentence, with exit code 2, before Ray starts and before a file is written."""

import shlex
from shutil import copytree, rmtree

import massive
import pytest
import tomli_w
from studies import write_study
from typer.testing import CliRunner

from raysim.cli import app
from raysim.sweeps.study_file import read_study

REFUSED = {
    "train": """
        nothing => Unknown recipe 'nothing'. Known: addition-gpt, digits-cnn, gpt2-wikitext2, hf, optimus-cc
        resnet18-cifar10 data.path=/nowhere => `data.path`
        digits-cnn --out /proc/nowhere/run => The run's folder /proc/nowhere/run cannot be written
        digits-cnn --engine inline --dashboard => `--dashboard` is Ray's and needs `--engine` ray, but got inline.
        digits-cnn --engine inline --wait 5 => `--wait` is Ray's and needs `--engine` ray, but got inline.
        digits-cnn --engine tpu => `engine` must be one of ray, inline, but got 'tpu'.
        digits-cnn --resume => `resume` needs `out`, the folder of the run to resume.
        digits-cnn --resume --out none => Nothing to resume: there is no run in none
        digits-cnn model.width=100000 => `cnn` needs
        digits-cnn stpes=5 => Did you mean `steps`?
        digit-cnn => Did you mean `digits-cnn`?
        digits-cnn model.widht=1 => Did you mean `model.width`?
        digits-cnn model=cn => Did you mean `cnn`?
        digits-cnn data=digit => Did you mean `digits`?
    """,
    "keys": """
        modle => Did you mean `model`?
        model resnet-18 => Did you mean `resnet18`?
    """,
    "bench pipeline": """
        --json /proc/nowhere/figures.json => `--json`
        --device tpu => `--device` must be cpu or cuda, but got 'tpu'.
    """,
    "simulate --network 8mbps": """
        digits-cnn => Exactly one of `device` (T4, V100,
        digits-cnn --device A100 --profile p.json => Exactly one of `device` (T4, V100,
        digits-cnn --device here.json => --profile here.json
        digits-cnn --device TPU => `device` must be one of T4, V100
        digits-cnn --profile none.json => The profile 'none.json' cannot be read
        digits-cnn --profile p.json --efficiency 0.5 => `--efficiency` is of the GPU of `--device`
        resnet18-cifar10 data.path=/nowhere --device A100 => `data.path`
        gpt2-wikitext2 data.train_samples=10000 --device A100 => `data.train_samples` must be an integer
    """,
    "simulate digits-cnn --network 8mbps --device A100": """
        --averaging ring => `--averaging` is for replicas, but the run has one.
        --network 1gbps/4MiB --window 2MiB => 1gbps/4MiB has a TCP window of its own, but got another, 2MiB
        --efficiency 1.5 => `efficiency` must be in (0, 1], but got 1.5.
        --codec-speed 0 => `codec_bytes_per_s` must be in (0, inf]
        schedule=Interleaved1F1B(3) => `num_stages` must be a multiple of
        batch_size=2048 => `batch_size` must be at most the number of training
        --json /nowhere/x.json => `--json` must be a file that can be written
        --network fast => `--network`: A network is a preset
    """,
    "place digits-cnn --network two-universities": """
        --profile nowhere.json => The profile 'nowhere.json' cannot be read
    """,
    "profile digits-cnn": """
        --out /nowhere/p.json => `--out` must be a file that can be written
        --out p.json --steps 0 => `num_steps` must be an integer of at least 1, but got 0.
    """,
    "decide --network 1mbps --out out": """
        digits-cnn forward=TopK(0.1) => `forward` has no effect, as settings are tried in its place: give --try 'forward=TopK(0.1)'
        compressed.toml => `forward` has no effect, as settings are tried in its place: give --try 'forward=TopK(0.1)'
        digits-cnn compress_from=5 => `compress_from` has no effect, as settings are tried in its place: leave it out.
        topics-gpt --data run.toml data.path=x => `--data` and data.path=x both name the data
        digits-cnn --cluster run.toml --address auto => `--address` has no effect with `--cluster`
        digits-cnn --cluster run.toml --json - => `--json` has no effect with `--cluster`
        digits-cnn num_stages=99 => `num_stages` must be at most the number of layers (7), but got 99.
        digits-cnn num_stages=1 => A run of one stage and one replica sends nothing to compress
        digits-cnn --budget soon => `budget` must be a time such as 90min
        digits-cnn --data nowhere.txt => `--data` must be a text file, but got 'nowhere.txt'
        digits-cnn --device T5 => `device`
        digits-cnn --profile nowhere.json => nowhere.json
        digits-cnn --device T4 --profile x.json => `--device` and `--profile` both say
        digits-cnn --transport tcp => `--transport`
        digits-cnn --try TopK(0.1) => `--try` must look like 'forward=TopK(0.1)
        digits-cnn --try replica_gradient=PowerSGD(2) => needs replicas, but the run has one
        digits-cnn --try tied_gradient=PowerSGD(2) => needs parameters that are tied between stages
        digits-cnn --files . => `--files` sends a folder to a cluster: add --cluster FILE.
    """,
    "decide --network 1mbps digits-cnn": """
        --resume => `--resume` needs `--out`
        --resume --out none => Nothing to resume
        --out full => is not empty
        --cluster none.yaml --out /shared => `--cluster` must be the file
    """,
    "decide digits-cnn --out out": """
        --network fast => `--network`: A network is a preset
    """,
    "screen run.toml": """
        --batches 3 => `--batches` must be from 1 to 2
        --try replica_gradient=PowerSGD(2) => needs replicas, but the run has one
        num_stages=1 => sends nothing to compress
        num_stages=1 num_replicas=2 --try forward=TopK(0.1) => needs links, but the run has one stage
        num_replicas=2 --try replica_gradient=DiLoCo(5) => DiLoCo
        forward.0=TopK(0.1) => `forward` has no effect, as settings are tried in its place: leave it out.
        --only-tried => `--only-tried`
        --plot p.png => `--plot` is for speed-ups, which need a network
        --out . => `--out` must be a new or empty folder
        --out run.toml => `--out` must be a folder that can be written, but run.toml: Not a directory.
        --out run.toml/records => `--out` must be a folder that can be written
        --out loose => `--out` must be a folder that can be written, but loose: No such file or directory.
        --out /proc/records => `--out` must be a folder that can be written
        --no-gradients --try 'forward=TopK(0.1) backward=TopK(0.1)' => needs gradients
        --no-gradients num_replicas=2 --try replica_gradient=PowerSGD(2) => PowerSGD(2) needs gradients: leave out `replica_gradient`
        --no-gradients --network 1mbps => without a backward, `--no-gradients` cannot price steps
        --device T5 --network 1mbps => T5
        --engine rey => `engine` must be one of ray, inline, but got 'rey'.
    """,
    "advise --devices 4xA100": """
        => Give a model: a recipe, a config.json
        --layers 8 --width 256 => Missing: --length, --vocabulary
        digits-cnnn => 'digits-cnnn'. Did you mean `digits-cnn`? You can also give a config.json
        digits-cnn --layers 3 => describe a model, but digits-cnn is one already
    """,
    "advise --layers 126 --width 16384 --length 8192 --vocabulary 128256 --devices 8xA100": """
        => but 8xA100 has 640 GB:
    """,
    "advise --layers 8 --width 256 --length 512 --vocabulary 1000": """
        --devices 4A100 => `--devices` must look like 8xA100
        --devices 4xA10O => unknown GPU 'A10O'. Did you mean `A10G`?
        --devices 1xA100 => 1xA100 is one host, which sends nothing to others: give two or more, such as 2x1xA100.
        --devices 128xA100 --network worldwide => worldwide has 64 hosts, but the job has 128
    """,
    "advise --layers 8 --width 256 --length 512 --vocabulary 1000 --devices 4xA100": """
        --stages 3 => `--stages` must divide the 4 hosts
        --stages 2 --replicas 0 => `--replicas` must divide the 4 hosts of 4xA100, but got 0.
        --batch 0 => `--batch` must be an integer of at least 1, but got 0.
        --microbatch 0 => `--microbatch` must be an integer of at least 1, but got 0.
        --try 'forward=TopK(0.1) forward=TopK(0.2)' => `--try` must name a key once
        --stages 2 --replicas 4 => must be the 4 hosts of 4xA100, but got 2 x 4
        --sharding FSDP(3) => `shards` of FSDP(3) must divide the number of replicas (4)
        --sharding ZeRO(3) => `--sharding`: Unknown sharding
        --sharding FSDP(4) --try replica_gradient=DiLoCo(10) => DiLoCo(10) does not fit 4 replicas, FSDP(4): it needs groups
        --batch 3 --replicas 2 => `--batch` must be a multiple of 2
        --efficiency 2 => `--efficiency` must be in (0, 1]
        --schedule 2F1B => schedule
        --schedule Interleaved1F1B(2) --batch 6 => multiple of the number of workers (4) for Interleaved1F1B(2), but got 6.
        --study s.toml => `--study` needs a network
        --local-steps ten => `--local-steps` must be numbers such as 10,100,500
        --try replica_gradient=PowerSGD(4) => add --replicas 2
        --stages 1 --try forward=TopK(0.1) => need links, but each replica is one stage: add --stages 2
        --network 1gbps --plot plot.svg => `--plot` must end in .png, but got 'plot.svg'.
    """,
    "sweep": """
        nothing => Unknown study 'nothing'. Known: answers-links, equal-bandwidth, equal-bandwidth-2026, equal-bandwidth-pictures
        quikstart => Did you mean `quickstart`?
        broken.toml => broken.toml is not TOML
        broken.py => The study broken.py cannot be imported: ZeroDivisionError: division by zero.
        empty.py => empty.py must hold a function `space(trial)` and a dict `study`.
        small.toml 'metrics=["accuracy", "math:sqrt"]' => must say whether more is better: set `sqrt.higher_is_better`
        pictures-causes => `data.path` must be a file or folder that exists, but got 'cifar10'.
        small.toml --resume => `resume` needs `out`, the folder of the study to resume.
        small.toml --resume --out none => Nothing to resume: none/study.toml cannot be read
        small.toml --out full => The folder full is not empty. Give another `out`, or `resume` the study in it.
        small.toml steps=9 --resume --out full => `base.steps` must be 4, as in the study to resume, but got 9.
        small.toml --out nope://bucket/study => `out`: nope://bucket/study cannot be opened: Unrecognized filesystem type
    """,
    "submit": """
        quickstart --out /srv/x => Give exactly one of `--cluster FILE`, as for `ray up`, and `--address URL`
        quickstart --out /srv/x --cluster none.yaml => but none.yaml is not a file.
        quickstart --out /srv/x --address head:6379 => must be the URL of the cluster's dashboard
    """,
    "submit --address http://127.0.0.1:1": """
        quickstart --out results => that every node sees, but got 'results'.
        quickstart --out s3://b/x --fetch . => . is not empty.
    """,
    "submit --address http://127.0.0.1:1 --out /srv/x": """
        quickstart => does not answer: Connection refused.
        quickstart --fetch new => needs `--cluster FILE`
        quickstar => Unknown study 'quickstar'. Did you mean `quickstart`?
        small.toml --files other => lies elsewhere.
    """,
    "validate --out cases": """
        --hosts 3 --replicas 2 => `--replicas` must divide `--hosts` (3)
        --replicas 2 --rate 50mbps+20ms => `--rate` must be without latency for replicas
        --codec TopK(2) => TopK
        --recipe digits-cn => digits-cn
        --recipe digits-cnn --hosts 8 => num_stages
        --rate fast => A link must be a rate
        --rate 20mbps/half => A link must be a rate
        --count --trips => `--count` and `--trips` are measurements of their own
        --count --rate 20mbps => `--rate` is for cases, not for `--count`
        --trips --hosts 3 => `--hosts` is for cases, not for `--trips`
        --count --codec TopK(2) => TopK
    """,
}
"""By command: further words => the sentence or a part of it."""
ROWS = [
    (f"{command} {words}".strip(), sentence.strip())
    for command, table in REFUSED.items()
    for words, _, sentence in (line.strip().partition("=>") for line in table.strip().splitlines())
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a run, studies that are good and bad, one that has begun, and a link to nowhere."""
    folder = tmp_path_factory.mktemp("files")
    study = read_study(write_study(folder))
    (folder / "full").mkdir()
    study.write(folder / "full")
    texts = {"run.toml": tomli_w.dumps(massive.KEYS), "broken.toml": "base = ", "broken.py": "1 / 0"}
    texts["compressed.toml"] = "base = 'digits-cnn'\nforward = 'TopK(0.1)'"
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty.py").write_text("study = {}")
    (folder / "loose").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize(("words", "sentence"), ROWS, ids=[words for words, _ in ROWS])
def test_bad_command_gives_one_sentence_error(files, tmp_path, monkeypatch, words, sentence):
    folder = copytree(files, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    done = CliRunner().invoke(app, shlex.split(words))
    assert done.exit_code == 2, done.output
    *progress, line = done.stderr.strip().splitlines()
    assert line.startswith("raysim: ")
    assert sentence in line
    assert not progress or words.startswith("decide ")
    assert not done.stdout
    rmtree(folder / "__pycache__", ignore_errors=True)
    assert sorted(path.name for path in folder.rglob("*")) == sorted(path.name for path in files.rglob("*"))
