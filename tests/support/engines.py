"""Inline engines of small pipelines, and reading what they hold."""

from raysim.engine.inline import InlineEngine
from raysim.pipeline.errors import StageError
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback
from raysim.training.feedback import sensitivities


def start(config):
    engine = InlineEngine(prepare(config))
    engine.start()
    return engine


def losses_of(engine, step):
    """Run a step, told what the one before says, and return the microbatches' losses, whichever worker owns the last stage."""
    reports = engine.step(step, engine.signals if step else StepFeedback())
    engine.signals = StepFeedback(sensitivities=sensitivities(reports))
    return [loss for report in reports for loss in report.losses]


def staged_gradients(engine, step=0):
    """Return the gradients that the stages hold just before they update."""
    held = {}
    for worker in engine.workers:
        update = worker.update

        def catch(*arguments, worker=worker, update=update):
            for stage in worker.stages.values():
                held.update({name: gradient.clone() for name, gradient in stage.gradients().items()})
            return update(*arguments)

        worker.update = catch
    engine.step(step)
    return held


def weights(engine, replica):
    per = len(engine.plan.rows)
    return {
        f"{index}.{name}": parameter
        for worker in engine.workers[replica * per : (replica + 1) * per]
        for index, stage in worker.stages.items()
        for name, parameter in stage.module.named_parameters()
    }


def break_at(worker, *places):
    """Let a worker fail at these places of its row, in the steps that follow."""
    execute = worker.row._execute
    broken = {worker.row.row[place] for place in places}

    def breaking(action):
        if action in broken:
            raise StageError(f"{action} of worker {worker.index} is broken on purpose")
        return execute(action)

    worker.row._execute = breaking


def mend(worker):
    """Take back what `break_at` did."""
    del worker.row._execute


def fail(worker):
    """Let the first stage of a worker fail, as a model may."""

    def refuse(*_):
        raise RuntimeError("no luck")

    worker.stages[min(worker.stages)].module.register_forward_pre_hook(refuse)
