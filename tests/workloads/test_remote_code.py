"""Python files in folders of transformers: run if they are asked for, and never on an answer from standard input."""

import json

import pytest
from hf_variants import CAUSAL, TEXT

from raysim import save_pretrained, train
from raysim.config import ConfigError
from raysim.plugins import trusting
from raysim.workloads.hf_model import hf, load_model
from raysim.workloads.language_models import gpt2
from raysim.workloads.tokenizers import HuggingFace

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a folder with weights of a model and a tokenizer that need its code, and the file that this code writes."""
    folder, marker = tmp_path / "own", tmp_path / "was_run"
    load_model(TEXT, config=CAUSAL["llama"]).save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    return folder, marker


def test_folder_code_needs_trust(own):
    folder, marker = own
    remedy = r"needs Python code of its own to be run\. If you trust it, set `model\.trust_remote_code = true`\.$"
    with pytest.raises(ValueError, match=remedy):
        hf(TEXT, path=str(folder))
    with pytest.raises(
        ValueError, match=r"`data\.tokenizer` .* needs Python code of its own, which is not run\. Write"
    ):
        HuggingFace(str(folder))
    with pytest.raises(ValueError, match=r"`model\.path` .* cannot be loaded: .* custom code"):
        gpt2(TEXT, path=str(folder))
    with pytest.raises(ValueError, match=r"`model\.trust_remote_code` must be true or false, but got 'yes'\."):
        hf(TEXT, path=str(folder), trust_remote_code="yes")  # type: ignore[arg-type]
    assert not marker.exists()


def test_extra_code_of_known_models_is_ignored(own):
    folder, marker = own
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert type(load_model(TEXT, path=str(folder))).__module__.startswith("transformers.")
    assert not marker.exists()


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_trusted_code_is_run_and_recorded(request, own, small, tmp_path, engine):
    if engine == "ray":
        request.getfixturevalue("ray")
    folder, marker = own
    model = {"name": "hf", "path": str(folder), "trust_remote_code": True}
    data = {"name": "topics", "length": 12, "train_samples": 64, "test_samples": 16}
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"vocab_size": 64', '"vocab_size": 256')
    )
    load_model(TEXT._replace(num_classes=256), config=CAUSAL["llama"]).save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(folder / "model.safetensors")
    run = train(small(model=model, data=data, num_stages=2, steps=2), engine=engine, out=tmp_path / "run")
    assert marker.exists()
    assert run.status == "finished"
    assert run.row["model.trust_remote_code"] is True
    if engine == "inline":
        marker.unlink()
        (tmp_path / "modules").rename(tmp_path / "modules that were imported")
        with pytest.raises(
            ConfigError, match=r"`model\.trust_remote_code` is named by a record, .* `--trust transformers_modules`"
        ):
            save_pretrained(run, tmp_path / "exported")
        assert not marker.exists()
        with trusting("transformers_modules"):
            save_pretrained(run, tmp_path / "exported")
        assert (tmp_path / "exported" / "config.json").is_file()
