"""CompressedLink: the losses of `raysim.train` from a plain loop, memories, checkpoints and refusals."""

import math
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from pipelines import GPT, with_slow
from torch import nn

import raysim
from raysim.codecs import NonFiniteError
from raysim.compressors import parse
from raysim.nn import CompressedLink, end_step, insert_links, link_report, samples
from raysim.pipeline.optimizer import learning_rate, make_optimizer
from raysim.pipeline.prepare import prepare
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.models import build_model

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk-quantize": {"forward": "TopK(0.1)", "backward": "Quantize(8)"},
    "per-boundary": {"forward": ["TopK(0.3)", "Nonzero"], "backward": ["Cast('bfloat16')", "Quantize(2)"]},
    "random": {"forward": "Quantize(4, rounding='stochastic')", "backward": "RandomK(0.3)"},
    "feedback": {"forward": "ErrorFeedback(TopK(0.1))", "backward": "ErrorFeedback(TopK(0.1), key='sample')"},
    "two-ended": {"forward": "EF21(TopK(0.2))", "backward": "EF21(Quantize(4), key='link')"},
    "aqsgd": {"forward": "AQSGD(Quantize(4))", "backward": "Quantize(8)", "steps": 9},
    "shared": {"forward": "TopK(0.3)", "backward": "Quantize(8)", "shared_indices": True},
    "adaptive": {"forward": "GraVAC(epsilon=0.5, window=1, promote='passing', throughput='link')"},  # of the plug-in
    "gpt": {**GPT, "forward": "TopK(0.1)", "backward": "WarmStart(LowRank(2))"},
}


def linked(config):
    """Return the model of a run with links at its cuts, and its plan and data."""
    workload = prepare(config)
    model = build_model(config.model.name, config.model.options, workload.data.shape, config.seed)
    links = {
        "forward": config.flat()["forward"],
        "backward": config.flat()["backward"],
        "num_microbatches": config.num_microbatches,
        "shared_indices": config.shared_indices,
        "seed": config.seed,
    }
    return insert_links(model, workload.plan.cuts, **links), workload


def train(model, workload, optimizer, steps):
    """Train in one plain loop and return each step's loss."""
    plan, split = workload.plan, workload.data.train
    config = plan.config
    losses = []
    for step in steps:
        found = []
        for microbatch in range(config.num_microbatches):
            epoch, ids = plan.microbatch(step, microbatch)
            with samples(ids, epoch=epoch):
                loss = CrossEntropy()(model(split.inputs(ids, epoch, config.seed, True)), split.targets(ids))
            (loss / config.num_microbatches).backward()
            found.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, plan.steps_per_epoch, plan.num_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(math.fsum(found) / len(found))
    return losses


@pytest.mark.parametrize("setting", with_slow(SETTINGS, *(SETTINGS.keys() - {"aqsgd", "shared", "gpt"})))
def test_a_plain_loop_gives_the_losses_and_bytes_of_a_run(setting, small, tmp_path):
    config = small(**SETTINGS[setting])
    run = raysim.train(config, engine="inline", out=tmp_path / "run")
    model, workload = linked(config)
    losses = train(model, workload, make_optimizer(config.optimizer, model.named_parameters()), range(config.steps))
    assert losses == run.steps["loss"].tolist()
    sent = run.links.groupby(["boundary", "direction"])[["wire_bytes", "dense_bytes", "packets"]].sum()
    counted = link_report(model).set_index(["boundary", "direction"])
    assert (counted[list(sent.columns)].sort_index() == sent).all().all()
    head, *_ = str(link_report(model)).splitlines()
    assert head.split() == list(link_report(model))  # whole, without a terminal's width


@pytest.mark.parametrize("setting", ["aqsgd", "adaptive"])
def test_checkpoint_resumes_bit_for_bit(setting, small, tmp_path):
    config = small(**SETTINGS[setting])
    model, workload = linked(config)
    optimizer = make_optimizer(config.optimizer, model.named_parameters())
    train(model, workload, optimizer, range(config.steps // 2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "kept.pt")
    rest = range(config.steps // 2, config.steps)
    expected = train(model, workload, optimizer, rest)

    again, _ = linked(config)
    resumed = make_optimizer(config.optimizer, again.named_parameters())
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    again.load_state_dict(kept["model"])
    resumed.load_state_dict(kept["optimizer"])
    assert train(again, workload, resumed, rest) == expected


def test_links_keep_the_names_of_the_layers():
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 1)))
    links = insert_links(model, ["a", "b"], forward=["TopK(0.5)", "Identity"])
    names = [name for name, _ in links.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_evaluation_leaves_the_memories_and_counts():
    link = CompressedLink("ErrorFeedback(TopK(0.25))")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    link(x)
    before = link.state_dict()["_extra_state"]
    link.eval()
    on = link(x)
    link.evaluation = "off"
    off = link(x)
    assert int((on != 0).sum()) == 4
    assert torch.equal(off, x)
    after = link.state_dict()["_extra_state"]
    assert torch.equal(before["memories"]["forward.sender"]["0.rows"], after["memories"]["forward.sender"]["0.rows"])
    assert link.report()["packets"].tolist() == [1, 0]


@pytest.mark.parametrize("evaluation", ["on", "off", "on_direct"])
@pytest.mark.parametrize(
    ("forward", "backward"), [("TopK(0.25)", "Quantize(4)"), ("ErrorFeedback(TopK(0.25))", "EF21(TopK(0.5))")]
)
def test_gradients_pass_in_evaluation_mode_as_without_the_link_but_compressed(forward, backward, evaluation):
    """As with frozen BatchNorm, whose model trains in evaluation mode."""
    torch.manual_seed(0)
    before, link, after = nn.Linear(8, 16), CompressedLink(forward, backward), nn.Linear(16, 2)
    x = torch.randn(4, 8)
    nn.Sequential(before, link, after)(x).sum().backward()  # the memories are not empty
    before.zero_grad()
    link.evaluation, kept = evaluation, link.state_dict()["_extra_state"]
    nn.Sequential(before, link, after).eval()(x).square().sum().backward()
    sent, received = before(x), before(x).detach()
    if evaluation != "off":
        received = parse(forward).codec.encode(received).decode()
    received.requires_grad_()
    after(received).square().sum().backward()
    gradient = received.grad if evaluation == "off" else parse(backward).codec.encode(received.grad).decode()
    (expected,) = torch.autograd.grad(sent, before.weight, gradient)
    assert expected.norm() > 0
    assert torch.equal(before.weight.grad, expected)
    assert str(link.state_dict()["_extra_state"]) == str(kept)


def test_a_gradient_in_evaluation_mode_shares_the_positions_of_its_activation():
    link = CompressedLink("TopK(0.25)", "Quantize(8)", shared_indices=True).eval()
    x = torch.randn(4, 16, requires_grad=True)
    y = link(x)
    y.square().sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    torch.testing.assert_close(x.grad, 2 * y.detach(), rtol=0.05, atol=0.05)


def test_a_gradient_shares_the_positions_of_its_own_activation_after_other_calls():
    link = CompressedLink("TopK(0.25)", shared_indices=True)
    first, second = (torch.tensor([values], requires_grad=True) for values in ([4.0, 3, 2, 1], [1.0, 2, 3, 4]))
    y, _ = link(first), link(second)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert first.grad.tolist() == [[2, 0, 0, 0]]


@pytest.mark.parametrize(
    "forward", ["Identity", "TopK(0.3)", "Quantize(4)", "EF21(TopK(0.3))", "AQSGD(Quantize(4), key='slot', warmup=0)"]
)
def test_a_layer_in_place_may_follow_a_link(forward):
    def outputs(*, inplace):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), CompressedLink(forward), nn.ReLU(inplace=inplace), nn.Linear(16, 4))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(4):
            optimizer.zero_grad()
            found.append(model(torch.randn(4, 8)))
            found[-1].square().mean().backward()
            optimizer.step()
        return torch.stack(found)

    assert torch.equal(outputs(inplace=True), outputs(inplace=False))


def test_a_layer_in_place_leaves_the_tensor_alone_of_which_a_link_takes_a_part():
    whole = torch.ones(4, 8).tanh()
    CompressedLink()(whole[2:]).mul_(2)
    assert torch.equal(whole, torch.ones(4, 8).tanh())


def test_short_step_is_ended_by_end_step():
    link = CompressedLink("ErrorFeedback(TopK(0.25))", num_microbatches=4)
    x = torch.ones(1, 8)
    link(x)
    end_step(link)
    assert link.step == 1
    link(x)
    assert list(link.links["forward", True].state) == [0]


def test_no_activation_is_saved_for_backward():
    link = CompressedLink("TopK(0.1)")
    x = torch.ones(4, 1000, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        link(x)
    assert saved == []


REFUSALS = {
    "unknown": (lambda: CompressedLink("TopKk(0.1)"), "TopKk"),
    "wrong way": (lambda: CompressedLink("Epilogue(TopK(0.1))"), "`forward` cannot be"),
    "schedule": (lambda: CompressedLink(backward="Epilogue(TopK(0.1))"), "outside of `raysim train`"),
    "sensitivity": (lambda: CompressedLink("ACGC(0.1)"), "outside of `raysim train`"),
    "microbatches": (lambda: CompressedLink(num_microbatches=0), "`num_microbatches` must be at least 1, but got 0."),
    "shared": (lambda: CompressedLink("Quantize(4)", shared_indices=True), "`shared_indices` needs a forward TopK"),
    "no such cut": (
        lambda: insert_links(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["2"]),
        "`cuts` must name layers of the model (0, 1), but got '2'.",
    ),
    "last cut": (
        lambda: insert_links(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["1"]),
        "`cuts` must name layers in the model's order, each once and none the last, but got 1.",
    ),
    "links twice": (
        lambda: insert_links(insert_links(nn.Sequential(nn.ReLU(), nn.ReLU()), ["0"], forward="TopK(0.1)"), ["0"]),
        "`model` must have no layer named as a new link, but has `link0`. Insert all links at once.",
    ),
    "too many": (
        lambda: insert_links(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["0"], forward=["Identity", "Identity"]),
        "`forward` must be one notation or a list with one per cut (1), but got 2.",
    ),
    "no samples": (
        lambda: CompressedLink("AQSGD(Quantize(4))")(torch.ones(2, 3)),
        "call the model in `with raysim.nn.samples(ids):`",
    ),
    "no epoch": (
        lambda: CompressedLink("AQSGD(Quantize(4), key='slot')")(torch.ones(2, 3)),
        "call the model in `with raysim.nn.samples(ids, epoch=epoch):`, or set `warmup=0`.",
    ),
    "no links": (lambda: link_report(nn.ReLU()), "The model must hold a CompressedLink, but holds none."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_a_sentence(case):
    act, words = REFUSALS[case]
    with pytest.raises(ValueError) as refused:
        act()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_samples_must_have_an_id_per_row():
    link = CompressedLink("AQSGD(Quantize(4))")
    with samples([1, 2, 3]), pytest.raises(ValueError) as refused:
        link(torch.ones(2, 3))
    assert str(refused.value) == "`samples` must name each row of a microbatch (2), but names 3."


def test_a_checkpoint_of_another_compressor_is_refused():
    kept = CompressedLink("TopK(0.1)").state_dict()
    with pytest.raises(ValueError) as refused:
        CompressedLink("TopK(0.2)").load_state_dict(kept)
    assert str(refused.value) == "`forward` must be TopK(0.1), as in the checkpoint, but got TopK(0.2)."


def test_a_compiled_model_sends_the_same_messages():
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        link = CompressedLink("ErrorFeedback(TopK(0.25))", backward="Quantize(8)")
        model = nn.Sequential(nn.Linear(8, 8), pickle.loads(pickle.dumps(link)), nn.Linear(8, 1))
        called = torch.compile(model, backend="eager") if compiled else model
        for step in range(3):
            loss = called(torch.full((4, 8), step + 1.0)).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert link_report(model)["packets"].tolist() == [3, 3]
    assert losses[:3] == losses[3:]


def test_a_disabled_scaler_skips_no_overflow():
    link = CompressedLink(backward="Quantize(8)", scaler=torch.amp.GradScaler("cpu", enabled=False))
    y = link(torch.ones(1, 4, requires_grad=True))
    with pytest.raises(NonFiniteError):
        (y * math.inf).sum().backward()


SCALED = ["Identity", "ErrorFeedback(TopK(0.25))", "EF21(Quantize(4))", "LazyErrorPropagation(WarmStart(LowRank(2)))"]
SCALED += ["AQSGD(Quantize(8), key='slot', warmup=0)"]


def trained_in_two_parts(backward, steps, scaler=None, *, training=True, broken=(), reload=False):
    """Return the parameters after some steps, of which the broken ones overflow below a link."""
    torch.manual_seed(0)
    layers = nn.Sequential(OrderedDict(a=nn.Linear(8, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 2)))

    def build():
        links = insert_links(layers, ["a", "b"], backward=backward, num_microbatches=2, scaler=scaler)
        return links.train(training)

    model, optimizer, overflows = build(), torch.optim.SGD(layers.parameters(), lr=0.1), False
    layers.b.register_forward_hook(
        lambda _, __, y: y.register_hook(lambda g: g * math.inf if overflows else g) and None
    )
    for step in steps:
        for microbatch in range(2):
            overflows = step in broken and microbatch == 1
            loss = (
                model(torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + microbatch))).square().mean()
            )
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if reload:
            again = build()
            again.load_state_dict(model.state_dict())
            model = again
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("backward", "options"),
    [("Quantize(4)", {"training": False})]
    + [(method, {"reload": reload}) for method in SCALED for reload in (False, True)],
)
def test_a_scaler_s_steps_are_those_without_it_and_an_overflow_changes_no_memory(backward, options):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.25, growth_interval=1)  # doubles in other steps
    skipping = trained_in_two_parts(backward, range(6), scaler, broken=(2, 3), **options)
    assert torch.equal(skipping, trained_in_two_parts(backward, (0, 1, 4, 5), **options))
