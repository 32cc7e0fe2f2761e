"""Arguments that methods refuse, each in its sentence, which names the argument."""

import pytest

from raysim.codecs import CODECS
from raysim.compressors import parse as parse_compressor
from raysim.notation import parse_notation
from raysim.replication import parse_replica_method

OF_REPLICAS = {
    "Accordion(TopK(0.1), TopK(0.5))": "`mild` must keep more than `strong`, but got TopK(0.1) and TopK(0.5)",
    "Accordion(TopK(0.1), LowRank(2))": "`mild` and `strong` must both be TopK",
    "Accordion(Quantize(8), Quantize(2))": "`mild` and `strong` must both be TopK",
    "Accordion(TopK(0.5), TopK(0.1), eta=0)": "`eta` must be in (0, 1], but got 0",
    "Accordion(TopK(0.5), TopK(0.1), interval=0)": "`interval` must be an integer of at least 1, but got 0",
    "PowerSGD(0)": "`rank` must be an integer of at least 1, but got 0",
    "PowerSGD(2, error='all')": "`error` must be one of average, own, but got 'all'",
    "PowerSGD(2, alternate=True, warm_start=False)": "`warm_start` must be True",
    "DGC(0)": "`density` must be in (0, 1], but got 0",
    "DGC(0.1, clip_norm=0)": "`clip_norm` must be in (0, 1e+30], but got 0",
    "DGC(0.1, select='random')": "`select` must be one of exact, sampled, bisect, but got 'random'",
    "RedSync(0.1, search='fast')": "`search` must be one of binary, trimmed, but got 'fast'",
    "EF21(TopK(0.1), start='warm')": "`start` must be one of dense, zero, but got 'warm'",
    "TopK(0)": "`density` must be in (0, 1], but got 0",
    "Nothing(3)": "Unknown replica method `Nothing`",
    "Gathered(TopK(0.1), min_values=0)": "`min_values` must be an integer of at least 1, but got 0",
    "Gathered(TopK(0.1), warmup=-1)": "`warmup` must be an integer of at least 0, but got -1",
    "Gathered(TopK(0.1), scope='layer')": "`scope` must be one of tensor, stage, but got 'layer'",
    "Gathered(TopK(0.1), seeds='none')": "`seeds` must be one of shared, separate, but got 'none'",
    "Gathered(LowRank(2), scope='stage')": "`scope` must be 'tensor' for LowRank(2), which works on matrices",
    "ErrorFeedback(TopK(0.1), key='sample')": "`key` of replica gradients cannot be 'sample'",
    **{
        method.format(
            codec
        ): f"`codec` of a memory must have an error below the tensor's norm, or the residual grows, but got {codec}."
        for codec in (
            "QSGD(2)",
            "QSGD(3, block=36)",
            "RandomK(0.5, unbiased=True)",
            "TinyScript(2)",
            "ATOMO(3.0)",
            "FixedPoint(1)",
        )
        for method in (
            "ErrorFeedback({})",
            "DiLoCo(2, codec=ErrorFeedback(TopK(0.1, values={})))",
            "DiLoCoX(2, values={})",
        )
    },
    **dict.fromkeys(
        (
            "DGC(0.1, values=QSGD(2))",
            "GraVAC(10, 100, values=TernGrad(clip=None))",
            "SparseLoCo(2, values=Quantize(1, rounding='stochastic'))",
            "DeCoSGD(0.1, values=TernGrad)",
            "EF21(Quantize(2, range='absmax', rounding='stochastic'))",
            "EF21(Entropy(QSGD(2)))",
        ),
        "`codec` of a memory must have an error below the tensor's norm, or the residual grows, but got ",
    ),
    "AQSGD(Quantize(4))": "Unknown replica method `AQSGD`",
    "DiLoCo(0)": "`steps` must be an integer of at least 1, but got 0",
    "DiLoCo(2, rate=0)": "`rate` must be in (0, 100], but got 0",
    "DiLoCo(2, momentum=1)": "`momentum` must be below 1, or the outer steps do not converge, but got 1",
    "DiLoCo(2, codec=MARINA(Natural))": "or a replica method that averages gradients only, but got MARINA(Natural)",
    "SparseLoCo(2, kept=0)": "`kept` must be an integer from 1 to 4096, but got 0",
    "SparseLoCo(2, decay=2)": "`decay` must be in [0, 1], but got 2",
    "SparseLoCo(2, values=3)": "`values` must be a codec, but got 3",
    "DiLoCo(2, codec=DiLoCo(2))": "`codec` must be a codec, alone or under error feedback",
    "DiLoCo(2, codec=7)": "`codec` must be a codec, alone or under error feedback",
    "GraVAC(100, 10)": "`cf_min` must be at most `cf_max`, but got 100 and 10",
    "GraVAC(0.5, 10)": "`cf_min` must be in [1, 1e+09], but got 0.5",
    "GraVAC(10, 100, epsilon=0)": "`epsilon` must be in (0, 1], but got 0",
    "GraVAC(10, 100, epsilon=1.1)": "`epsilon` must be in (0, 1], but got 1.1",
    "GraVAC(10, 100, omega=0)": "`omega` must be in (0, 1], but got 0",
    "GraVAC(10, 100, window=0)": "`window` must be an integer of at least 1, but got 0",
    "GraVAC(10, 100, policy='linear')": "`policy` must be one of exponential, geometric, but got 'linear'",
    "GraVAC(10, 100, select='best')": "`select` must be one of exact, sampled, bisect, random, but got 'best'",
    "GraVAC(10, 100, gain='norm')": "`gain` must be one of fed, raw, folded, but got 'norm'",
    "GraVAC(10, 100, settle=-1)": "`settle` must be an integer of at least 0, but got -1",
    "GraVAC(10, 100, ewma_alpha=2)": "`ewma_alpha` must be in (0, 1], but got 2",
    "GraVAC(10, 100, select='random', values=Quantize(4))": "`values` must be Identity with `select='random'`, whose values are summed",
    "GraVAC(10)": "missing a required argument: 'cf_max'",
    "DiLoCoX(0)": "`steps` must be an integer of at least 1, but got 0",
    "DiLoCoX(2, delay=2)": "`delay` must be an integer from 0 to 1, but got 2",
    "DiLoCoX(2, rank=0)": "`rank` must be an integer of at least 1, but got 0",
    "DiLoCoX(2, values=3)": "`values` must be a codec, but got 3",
    "HALoS(2, updates=2, delay=2)": "`delay` must be an integer from 0 to 1, but got 2",
    "HALoS(2, merge=0)": "`merge` must be in (0, 1], but got 0",
    "HALoS(2, global_momentum=1)": "`global_momentum` must be below 1",
    "AsyncSPARTA(share=0)": "`share` must be in (0, 1], but got 0",
    "AsyncSPARTA(rise=5, until=6)": "`until` must be an integer of at least 7, but got 6",
    "DeCoSGD(0)": "`density` must be in (0, 1], but got 0",
    "Dion(0)": "`rank` must be an integer of at least 1, but got 0",
    "StreamingDiLoCo(2, fragments=3)": "`fragments` must be an integer from 1 to 2, but got 3",
    "StreamingDiLoCo(2, delay=2)": "`delay` must be an integer from 0 to 1, but got 2",
    "StreamingDiLoCo(2, blend=2)": "`blend` must be in [0, 1], but got 2",
    "SPARTA(0)": "`share` must be in (0, 1], but got 0",
    "DeMo(0)": "`kept` must be an integer from 1 to 4096, but got 0",
    "GTopK(2)": "`density` must be in (0, 1], but got 2",
    "EDGC(4, window=5, every=6)": "`every` must be an integer from 1 to 5, but got 6",
}
OF_COMPRESSORS = {
    "GraVAC(10, 2)": "`cf_min` must be at most `cf_max`, but got 10 and 2",
    "GraVAC(epsilon=0)": "`epsilon` must be in (0, 1], but got 0",
    "GraVAC(omega=2)": "`omega` must be in (0, 1], but got 2",
    "GraVAC(window=0)": "`window` must be an integer of at least 1, but got 0",
    "GraVAC(probe_every=0)": "`probe_every` must be an integer of at least 1, but got 0",
    "GraVAC(ladder='steep')": "`ladder` must be one of topk, bits, rank, but got 'steep'",
    "GraVAC(ladder=())": "`ladder` must be topk, bits, rank, or codecs from mild to strong, but got ()",
    "GraVAC(cf_max=100, ladder='bits')": "`cf_max` has an effect only with `ladder='topk'`, but got 'bits'",
    "GraVAC(memory='all')": "`memory` must be one of slot, sample, link, but got 'all'",
    "GraVAC(throughput='wire')": "`throughput` must be one of step, link, but got 'wire'",
    "GraVAC(ladder=(RandomK(0.1, unbiased=True),), memory='slot')": "Leave `unbiased` out.",
    "GraVAC(ewma_alpha=0)": "`ewma_alpha` must be in (0, 1], but got 0",
    "ResidualVQ(bits=0)": "`bits` must be an integer from 1 to 12, but got 0.",
    "ResidualVQ(bits=3, fresh=8)": "`fresh` must be an integer from 0 to 7, but got 8.",
    "ResidualVQ(pace=0)": "`pace` must be in (0, 1], but got 0.",
    "Epilogue(TopK(0.1), flush=True)": "`flush` sends the residual of a LazyErrorPropagation, but got TopK(0.1)",
    "Epilogue(Epilogue(TopK(0.1)))": "`inner` must be a codec or a compressor of both directions, but got Epilogue(TopK(0.1))",
    "LazyErrorPropagation(EF21(TopK(0.1)))": "`inner` must keep its memory at the sender only, but got EF21(TopK(0.1))",
    "LazyErrorPropagation(RandomK(0.1, unbiased=True))": "Leave `unbiased` out.",
    **{
        f"LazyErrorPropagation({inner})": f"`inner` must keep no residual, or errors would be sent twice, but got {inner}"
        for inner in ("ErrorFeedback(TopK(0.1))", "LazyErrorPropagation(TopK(0.1))", "GraVAC(memory='slot')")
    },
    "ErrorFeedback(TopK(0.5, values=Hadamard(RandomK(0.1, unbiased=True))))": "Leave `unbiased` out.",
    "AQSGD(RandomK(0.1, unbiased=True))": "Leave `unbiased` out.",
    "LazyErrorPropagation(3)": "`inner` must be a codec or a compressor of both directions, but got 3",
    "LazyErrorPropagation(TopK(0.1), reset='epoch')": "`reset` must be one of never, step, but got 'epoch'",
    "ACGC(0)": "`budget` must be in (0, 1], but got 0",
    "ACGC('half')": "`budget` must be in (0, 1], but got 'half'",
    "Epilogue(ACGC(0.1))": "`inner` must be a codec or a compressor of both directions, but got ACGC",
    "LazyErrorPropagation(ACGC(0.1))": "`inner` must be a codec or a compressor of both directions, but got ACGC",
    "MixedErrorFeedback(TopK(0.1, index='int32'))": "`index` of the TopK must be 'auto' here, as Nonzero sends positions",
}
OF_CODECS = {
    "QSGD(1)": "`bits` must be an integer from 2 to 8, but got 1.",
    "Hadamard(Quantize(4), tile=24)": "`tile` must be a power of two, but got 24.",
    "Hadamard(3)": "`codec` must be a codec, but got 3.",
    "MX('e3m2')": "`element` must be one of e2m1, e4m3, e5m2, but got 'e3m2'.",
    "LowRank(0)": "`rank` must be an integer of at least 1, but got 0.",
    "RandomK(0.1, unbiased=1)": "`unbiased` must be True or False, but got 1.",
    "EstimatedTopK(0.1, 'best')": "`policy` must be one of sampled, bisect, gaussian, exponential, but got 'best'.",
    "Quantize(4, block=64)": "`block` is the size of a group with `per='block'`, but got 64 with `per='tensor'`.",
    "NonUniform(9)": "`bits` must be an integer from 1 to 8, but got 9.",
    "ZFP(0)": "`tolerance` must be in (0, 1e+30], but got 0.",
    "MPC(0)": "`stride` must be an integer from 1 to 1048576, but got 0.",
    "TAHQuant(high=2)": "`high` must be in [0, 1], but got 2.",
    "Threshold(0)": "`threshold` must be in (0, 3e+38], but got 0.",
    "Entropy(Entropy(Quantize(4)))": "`codec` must be one that is not compressed yet, but got Entropy(Quantize(4)).",
    "Sign(per='row', scaled=False)": "`per` has no effect with `scaled=False`, which sends no scales, but got 'row'. Leave it out.",
    "ErrorBounded(-1)": "`bound` must be in (0, 1e+30], but got -1.",
    "TernGrad(0)": "`clip` must be in (0, 1e+06], but got 0.",
    "ATOMO(0)": "`budget` must be in (0, 1e+06], but got 0.",
    "Rotated(1)": "`bits`",
    "Rotated(6)": "`bits`",
    "Rotated(4, kept=-1)": "`kept`",
}
CASES = [
    *((parse_replica_method, *each) for each in OF_REPLICAS.items()),
    *((parse_compressor, *each) for each in OF_COMPRESSORS.items()),
    *((lambda text: parse_notation(text, CODECS), *each) for each in OF_CODECS.items()),
]


@pytest.mark.parametrize(("parse", "text", "sentence"), CASES, ids=[text for _, text, _ in CASES])
def test_an_argument_out_of_bounds_is_refused_by_its_name(parse, text, sentence):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert sentence.removesuffix(".") in str(error.value)
    assert "\n" not in str(error.value)
