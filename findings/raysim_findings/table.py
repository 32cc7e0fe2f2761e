"""The claims of papers tested on runs, as one table: the compared settings, the measure, the side and the threshold.

A new claim is one more entry. Harm is how much worse the final quality is: in points of accuracy, or per cent of the loss. "Does no
harm" means surely below the margin: failing to find a difference is not enough. Models at chance are no evidence for claims about
quality. The quotations are from the abstracts; for Optimus-CC, the abstract and the authors' code were read. GraVAC's claim on
multi-level compression is left out: it saves compression time against a variant that raysim does not have.
"""

from __future__ import annotations

from functools import partial

from raysim.config.identity import Setting
from raysim_findings import claim, matches
from raysim_findings.claim import HARM, MARGIN, SWITCHED_OFF, Claim, Margins, Part, Parts, no_harm
from raysim_findings.matches import FAR_FEWER, FEEDBACK, LEAST_FLOOR, NOISE, both_ways

RUDAKOV = "Rudakov, Beznosikov, Kholodov, Gasnikov 2023 (2401.07788)"
GRAVAC = "Tyagi, Swany 2023, GraVAC (2305.12201)"
OPTIMUS_CC = "Song et al. 2023, Optimus-CC (2301.09830)"

SEVERE = 10.0  # margins that count as severe harm: 5 points of accuracy, or 10 % of the loss
LEAST_FACTOR = 13.5  # in values, GraVAC on VGG16 at epsilon 0.9; the paper's others are 19 to 289
SAME_SPEED = 5.0  # per cent of a step within which compressing a part counts as no slower than compressing all
TWO_REPLICAS = ("digits-cnn", "num_stages=1", "num_replicas=2", "num_microbatches=1")
ReplicaClaim = partial(Claim, num_replicas=2, recipe=TWO_REPLICAS)
OPTIMUS_CC_DENSE = ("optimus-cc", "backward=Identity", "replica_gradient=Identity", "fused_embedding=false")

FREES = (
    Part("switching it off does no harm", SWITCHED_OFF, "below", MARGIN, other="setting"),
    Part("and less than without", claim.FREED, "above", 0.0, other="plain"),
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "gradients-milder",
        "Gradients need milder compression than activations.",
        "gradients require milder compression rates than activations",
        RUDAKOV,
        "The setting with the stronger codec on gradients is compared with the same codecs swapped; of TopK and of Quantize, "
        "in the mean over all such pairs. Supported if the mean harm is surely above 0, contradicted if it is surely "
        "below.",
        Parts(matches.unequal_links, Part("gradients need it milder", HARM, "above", 0.0, "harsh", "mild")),
        (Setting("TopK(0.1)", "TopK(0.3)"), Setting("Quantize(2)", "Quantize(6)")),
        pooled=True,
    ),
    Claim(
        "asymmetry-of-range",
        "Gradients need milder quantisation because of the quantiser's range: around zero they do not.",
        "",
        f"raysim, a hypothesis on the claim above of {RUDAKOV}",
        "A range from the least to the greatest value has no level at zero, around which gradients lie; `range='absmax'` has."
        " The setting with fewer bits on gradients is compared with the same bits swapped, of each range. Supported if the"
        " harm is surely above the margin with the first range and surely below with the second; contradicted if either "
        "surely is not.",
        Parts(
            matches.bits_around_zero,
            Part("between the least and the greatest value, they do", HARM, "above", MARGIN, "harsh", "mild"),
            Part("around zero, gradients need no milder one", HARM, "below", MARGIN, "setting", "swapped"),
        ),
        (Setting("Quantize(6, range='absmax')", "Quantize(2, range='absmax')"),),
    ),
    Claim(
        "ten-per-cent",
        "TopK of 10 % is the strongest that does no severe harm.",
        "K=10% is the lowest TopK compression level, which does not harm model convergence severely",
        RUDAKOV,
        f"Severe is {SEVERE:g} margins: 5 points of accuracy or 10 % of the loss (ours; the abstract gives no figure). "
        "Supported if 10 % both ways harms surely less and every smaller density surely more; contradicted if one "
        "surely does otherwise.",
        Parts(
            matches.density_both_ways,
            Part("10 % does no severe harm", HARM, "below", Margins(SEVERE), "tenth"),
            Part("less than 10 % does severe harm", HARM, "above", Margins(SEVERE), "less"),
        ),
        (both_ways("TopK(0.1)"), both_ways("TopK(0.05)")),
    ),
    Claim(
        "inference-compressed",
        "Models trained under strong TopK (10 % or less) need compression at inference.",
        "models trained with TopK perform well only when compression is also applied during inference",
        RUDAKOV,
        "Of densities of 10 % or less on activations. Supported if switching compression off harms each model surely by "
        "more than the margin, contradicted if one is surely harmed by less.",
        Parts(
            matches.sparse_activations,
            Part("switching it off does harm", SWITCHED_OFF, "above", MARGIN, other="setting"),
        ),
        (both_ways("TopK(0.1)"),),
    ),
    Claim(
        "batchnorm-explains",
        "Models with BatchNorm need compression at inference partly because its statistics are those of compressed activations.",
        "",
        f"raysim, a hypothesis on the claim above of {RUDAKOV}",
        "Of densities of 10 % or less on activations. Each model is evaluated with compression on and off, with the "
        "statistics of training and with statistics estimated under each mode. Supported if the harm of switching "
        "compression off is surely smaller with the latter, by more than the margin, contradicted if it surely is not.",
        Parts(
            matches.sparse_activations,
            Part("statistics of each mode spare a part", claim.SPARED_BY_STATISTICS, "above", MARGIN, other="setting"),
        ),
        (both_ways("TopK(0.1)"),),
        recipe=("resnet18-cifar10", "evaluate_batchnorm_batches=20"),
    ),
    Claim(
        "feedback-no-better",
        "Error feedback does not improve on plain TopK.",
        "error feedback techniques do not improve model-parallel training compared to plain compression",
        RUDAKOV,
        "Error feedback, its mixed form and EF21, one way or both, against the same TopK without. Supported if plain TopK "
        "is surely less than the margin worse than each, contradicted if it is surely worse by more than one.",
        Parts(matches.with_memory(*FEEDBACK), Part("no gain from feedback", HARM, "below", MARGIN, "plain", "setting")),
        (both_ways("ErrorFeedback(TopK(0.1))"), Setting("TopK(0.1)", "ErrorFeedback(TopK(0.1))")),
    ),
    Claim(
        "feedback-frees",
        "Error feedback frees inference from compression.",
        "but allow model inference without compression with almost no quality drop",
        RUDAKOV,
        "Feedback on gradients alone counts too: it is what the paper's code runs. Supported if switching compression off "
        "harms each model surely less than the margin, and surely less than the same model without feedback.",
        Parts(matches.with_memory(*FEEDBACK, inference=True), *FREES),
        (both_ways("ErrorFeedback(TopK(0.1))"), Setting("TopK(0.1)", "ErrorFeedback(TopK(0.1))")),
    ),
    Claim(
        "feedback-is-noise",
        "Error feedback frees inference because it acts as noise: noise of equal norm does so as well.",
        "",
        RUDAKOV,
        "The explanation is attributed to the paper, whose text was not read. The control replaces the residual by noise of "
        f"its norm ({NOISE}). Supported if the control is freed as `feedback-frees` asks of feedback, contradicted if it"
        " surely is not.",
        Parts(matches.with_memory(NOISE, inference=True), *FREES),
        (both_ways(f"{NOISE}(TopK(0.1))"),),
    ),
    Claim(
        "slots-mix-samples",
        "Error feedback on activations does harm because residuals kept by slot mix samples: kept by sample it does none.",
        "",
        f"raysim, a hypothesis on the claim of error feedback by {RUDAKOV}",
        "Beside plain TopK of activations and the same gradients, by the margin. Supported if the residual of a slot, "
        "which goes with another sample in the next step, does surely more harm and the residual of a sample surely less; "
        "contradicted if either surely does not.",
        Parts(
            matches.residual_by_sample,
            Part("kept by slot, it does harm", HARM, "above", MARGIN, "slot", "without"),
            Part("kept by sample, it does none", HARM, "below", MARGIN, "setting", "without"),
        ),
        (Setting("ErrorFeedback(TopK(0.1), key='sample')", "TopK(0.1)"),),
    ),
    Claim(
        "aq-sgd-topk",
        "AQ-SGD with TopK under 30 % does harm, and with 30 % it does not.",
        "when applied with the AQ-SGD approach, TopK stronger than with K=30% worsens model performance significantly",
        RUDAKOV,
        "Beside dense, by the margin. Supported if every density below 30 % harms surely more and 30 % surely less, "
        "contradicted if one surely does otherwise.",
        Parts(
            matches.aq_sgd,
            Part("less than 30 % does harm", HARM, "above", MARGIN, "less"),
            Part("30 % does no harm", HARM, "below", MARGIN, "third"),
        ),
        (Setting("AQSGD(TopK(0.1))", "TopK(0.1)"), Setting("AQSGD(TopK(0.3))", "TopK(0.3)")),
    ),
    Claim(
        "tah-quant",
        "TAH-Quant does no harm.",
        "aggressive activation quantization (3-4 bits) ratio [...] without compromising training convergence",
        "He et al. 2025, TAH-Quant (2506.01352)",
        "Beside dense, by the margin; gradients may be coded by TAH-Quant too. Supported if every such setting harms surely less, "
        "contradicted if one surely harms more. Ramasinghe et al. 2026 (2609.14339; a summary was read) measure severe harm to "
        "generated code.",
        Parts(matches.tah_quant, no_harm("it does no harm")),
        (Setting("TAHQuant(tile=64)"), both_ways("TAHQuant(tile=64)")),
    ),
    Claim(
        "separate-indices",
        "TopK with separate indices for gradients does harm to language models.",
        "",
        RUDAKOV,
        "From a summary of the paper (independent compression of activations and gradients may diverge), not from its text. "
        "Separate against shared indices at one density, in the mean over densities. Supported if the harm is surely above "
        "the margin.",
        Parts(
            matches.shared_or_separate, Part("separate indices do harm", HARM, "above", MARGIN, "separate", "shared")
        ),
        (both_ways("TopK(0.1)"),),
        pooled=True,
        language=True,
        recipe=("topics-gpt",),
    ),
    ReplicaClaim(
        "gravac",
        "GraVAC keeps dense quality at far fewer values.",
        "achieving the same or better accuracy than dense SGD (i.e., no compression) in the same number of iterations/epochs",
        GRAVAC,
        f"On replica gradients, as in the paper, with the gain of its text and a floor of {LEAST_FLOOR:g} or more. "
        "Supported if the harm against dense is surely below the margin, and the factor in values surely above "
        f"{LEAST_FACTOR:g}, the least that the paper reports; contradicted if either surely is not.",
        Parts(
            matches.published_gravac,
            no_harm("it keeps dense quality"),
            Part("at far fewer values", claim.VALUE_FACTOR, "above", LEAST_FACTOR, other="setting"),
        ),
        (Setting(replica_gradient="GraVAC(10.0, 1000.0, window=50)"),),
    ),
    ReplicaClaim(
        "gravac-speed",
        "GraVAC's steps are shorter than the steps of a static factor of 10, at dense quality.",
        "As opposed to using a static compression factor, GraVAC reduces end-to-end training time for ResNet101, VGG16 and "
        "LSTM by 4.32x, 1.95x and 6.67x respectively",
        GRAVAC,
        f"Relative to TopK at 10x, as in the paper's table, with the gain of its text and a floor of {LEAST_FLOOR:g} or more; "
        "of the mean step on one network, since the number of steps is the same. Supported if the step is surely shorter "
        "and quality is kept: by how much depends on the network, and is reported.",
        Parts(
            matches.published_gravac,
            no_harm("it keeps dense quality"),
            Part("in steps that are shorter", claim.SLOWDOWN, "below", 0.0, other="static"),
        ),
        (Setting(replica_gradient="GraVAC(10.0, 1000.0, window=50)"),),
    ),
    ReplicaClaim(
        "accordion",
        "Accordion keeps dense quality at fewer bytes than its mild compression.",
        "maintains similar model accuracy to uncompressed training, yet achieves up to 5.5x better compression and up to 4.1x"
        " end-to-end speedup over static approaches",
        "Agarwal, Wang, Lee, Venkataraman, Papailiopoulos 2020, Accordion (2010.16248)",
        "Supported if the harm against dense is surely below the margin, and the bytes are surely fewer than the bytes of "
        "its mild codec used throughout; contradicted if either surely is not. The paper's 'up to' sets no bar: the factor"
        " is reported.",
        Parts(
            matches.accordion,
            no_harm("it keeps dense quality"),
            Part("at fewer bytes", claim.SAVING, "above", 1.0, other="mild"),
        ),
        (Setting(replica_gradient="Accordion(LowRank(4), LowRank(1), interval=1)"),),
    ),
    ReplicaClaim(
        "warm-up",
        "Strong compression of replica gradients keeps dense quality with a warm-up, and is worse without.",
        "",
        "Lin, Han, Mao, Wang, Dally 2017, Deep Gradient Compression (1712.01887)",
        "The paper, whose text was not read, names warm-up training among its means to keep accuracy. Settings with `ramp` or"
        " `warmup` against dense, and against the same without. Supported if the first harm is surely below the margin and "
        "the second surely above 0.",
        Parts(
            matches.warm_up,
            no_harm("with it, no harm"),
            Part("without it, worse", HARM, "above", 0.0, "without", "setting"),
        ),
        (Setting(replica_gradient="DGC(0.01, ramp=4)"),),
    ),
    ReplicaClaim(
        "diloco",
        "DiLoCo keeps the quality of averaging gradients in every step at a hundredth of the bytes.",
        "DiLoCo on 8 workers performs as well as fully synchronous optimization while communicating 500 times less",
        "Douillard et al. 2023, DiLoCo (2311.08105)",
        f"Of DiLoCo on uncompressed links whose notation promises {FAR_FEWER:g} times fewer bytes: steps between exchanges, "
        "times 32 over the bits of `Quantize`. Supported if the harm against dense is surely below the margin after as many"
        " steps, and the factor in bytes surely above the promise; contradicted if either surely is not.",
        Parts(
            matches.far_fewer_local_steps,
            no_harm("it keeps the quality of an average in every step"),
            Part("at far fewer bytes", claim.SAVING, "above", FAR_FEWER),
        ),
        (Setting(replica_gradient="DiLoCo(30, codec=Quantize(4))"),),
    ),
    ReplicaClaim(
        "edgc",
        "EDGC does no harm.",
        "EDGC significantly reduces communication latency and training time by up to 46.45% and 16.13% while preserving LLM "
        "accuracy",
        "Yi et al. 2025, EDGC (2511.10333)",
        "Beside the same links with uncompressed replica gradients, by the margin, after as many steps. Supported if every such "
        "setting harms surely less, contradicted if one surely harms more.",
        Parts(matches.entropy_driven, Part("it does no harm", HARM, "below", MARGIN, other="links")),
        (Setting(replica_gradient="EDGC(8, window=20, every=2, warmup=20)"),),
    ),
    Claim(
        "lazy-error-propagation",
        "Low-rank gradients at boundaries do harm, and lazy error propagation mends it.",
        "we propose techniques to avoid the model quality drop that comes from the compression",
        OPTIMUS_CC,
        "Beside dense, by the margin. Supported if the harm is surely below it with lazy error propagation and surely "
        "above it without; contradicted if either surely is not.",
        Parts(
            matches.wrapped_gradients("LazyErrorPropagation"),
            no_harm("with it, no harm"),
            Part("without it, harm", HARM, "above", MARGIN, "inner"),
        ),
        (Setting(backward="LazyErrorPropagation(LowRank(16))"),),
    ),
    Claim(
        "epilogue-only",
        "Compressing the epilogue alone does no harm and is hardly slower than compressing all gradients.",
        "we analyze the pipeline and opt to selectively compress those traffic lying on the critical path. This further helps"
        " reduce the compression error",
        OPTIMUS_CC,
        f"Hardly slower: less than {SAME_SPEED:g} % of a step (ours). Supported if the harm against dense is surely below "
        "the margin and the step is surely hardly slower than with compression everywhere; contradicted if either surely "
        "is not.",
        Parts(
            matches.wrapped_gradients("Epilogue"),
            no_harm("no harm"),
            Part("hardly slower", claim.SLOWDOWN, "below", SAME_SPEED, other="inner"),
        ),
        (Setting(backward="Epilogue(LazyErrorPropagation(LowRank(16)))"),),
    ),
    Claim(
        "selective-stages",
        "Compressing the replica gradients of the earliest stages alone does no harm and is hardly slower than compressing all.",
        "selectively compress those traffic lying on the critical path",
        OPTIMUS_CC,
        f"A list of methods by stage whose tail is dense. Hardly slower: less than {SAME_SPEED:g} % of a step (ours). "
        "Supported if the harm against dense is surely below the margin and the step surely within that of the same method "
        "at all stages.",
        Parts(
            matches.earliest_stages,
            no_harm("no harm"),
            Part("hardly slower", claim.SLOWDOWN, "below", SAME_SPEED, other="everywhere"),
        ),
        (Setting(replica_gradient='["PowerSGD(8)", "PowerSGD(8)", "PowerSGD(8)", "Identity"]'),),
        num_replicas=2,
        recipe=OPTIMUS_CC_DENSE,
    ),
    Claim(
        "fused-embedding",
        "One synchronisation of tied embeddings in place of two does no harm and sends fewer bytes.",
        "we compress the inter-stage backpropagation and the embedding synchronization in addition to the existing data-"
        "parallel traffic compression methods",
        OPTIMUS_CC,
        "Fusing is exact but for the order of sums. Supported if the harm against the same run without is surely below the "
        "margin and the bytes of a step over all links are surely fewer; contradicted if either surely is not.",
        Parts(
            matches.fused,
            Part("no harm", HARM, "below", MARGIN, other="apart"),
            Part("fewer bytes", claim.FEWER_BYTES, "above", 1.0, other="apart"),
        ),
        (Setting(fused_embedding=True),),
        language=True,
        num_replicas=2,
        recipe=OPTIMUS_CC_DENSE,
    ),
    Claim(
        "double-buffered",
        "Two buffers of weights in place of a flush cost no quality, and steps are shorter.",
        "PipeDream-2BW can accelerate the training of large GPT and BERT language models by up to 20x with similar final "
        "model accuracy",
        "Narayanan, Phanishayee, Shi, Chen, Zaharia 2020, PipeDream-2BW (2006.09503)",
        "'Similar' is read as harm below the margin, after as many steps at the same settings. The paper's factor is against "
        "other systems, so no bar is set: that a step without a flush is shorter than one with it is asked, on one network, "
        "and by how much is reported. Supported if both surely hold; contradicted if either surely does not.",
        Parts(
            matches.double_buffered,
            no_harm("it keeps the quality of synchronous weights"),
            Part("in steps that are shorter", claim.SLOWDOWN, "below", 0.0),
        ),
        (Setting(weights="DoubleBuffered"),),
    ),
)
