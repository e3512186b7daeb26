"""What the doctor says of a job before it runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from megatron.core.transformer import transformer_config

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.doctor import job as doctor_job
from ditron_train.tools.doctor.job import JobReport
from ditron_train.tools.job import read_job

DENSE = "pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --bf16 --swiglu"
TP = f"{DENSE} --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel"
SP = f"{DENSE} --disable-bias-linear --context-parallel-size 2 --cp-comm-type a2a --attention-dropout 0 --ditron sp"
EP = (
    f"{DENSE} --disable-bias-linear --expert-model-parallel-size 4 --num-experts 8 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --ditron ep"
)
FLEX = "--moe-token-dispatcher-type flex"
LORA = "--q-lora-rank 1536 --kv-lora-rank 512"
QKV, PROJ = "attention: linear_qkv", "attention: linear_proj"
QKV_A2A, OUT_A2A = "attention: QKV projection with its exchange", "attention: output projection with its exchange"
MOVED, FUSED = "experts: dispatch and combine", "experts: GEMMs in one kernel with them"
GATHERS = "attention: gathers of keys and values"
QUANTISED = "experts: grouped quantization to FP8"


@pytest.fixture(params=["0.16", "newer"])
def either_megatron(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's configuration as it is installed, and with the field that newer versions have for captured parts."""
    if request.param == "newer":
        real = transformer_config.MLATransformerConfig
        fields = [("cuda_graph_modules", Any, dataclasses.field(default="full"))]
        newer = dataclasses.make_dataclass("Newer", fields, bases=(real,))
        monkeypatch.setattr(transformer_config, "MLATransformerConfig", newer)


def examine_job(words: str) -> JobReport:
    return doctor_job.examine_job([f"{words} "])


def config_of(words: list[str]) -> Any:
    return read_job(words).config


def reasons(words: str) -> dict[str, str | None]:
    return {part.name: part.native_because for part in examine_job(words).parts}


@pytest.mark.parametrize(
    "base",
    [
        TP,
        SP,
        EP,
        f"{TP} --ditron tp",
        f"{TP} --transformer-impl local --ditron tp",
        f"{TP} --add-qkv-bias",
        f"{TP} --delay-wgrad-compute",
        f"{SP} --add-qkv-bias",
        f"{SP} --cp-comm-type all_gather --num-attention-heads 31 --kv-channels 128",
    ],
)
def test_a_job_of_usual_flags_is_fast_all_over(base: str) -> None:
    found = reasons(base)
    assert found and set(found.values()) == {None}


@pytest.mark.parametrize(
    ("words", "part", "says"),
    [
        (f"{TP} --tp-comm-overlap", PROJ, "userbuffers"),
        (
            f"{TP} --fp8-format hybrid --fp8-recipe tensorwise --delay-wgrad-compute",
            PROJ,
            "the weight gradient is delayed",
        ),
        (f"{TP} --fp8-format e4m3 --fp8-recipe mxfp8", PROJ, "FP8 by the recipe MXFP8BlockScaling"),
        (f"{TP} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather", PROJ, "--fp8-param-gather"),
        (f"{TP} --seq-length 64 --micro-batch-size 1", QKV, "at most 32 features, or tokens a rank"),
        (f"{SP} --test-mode", QKV_A2A, "flash decoding or test mode is on"),
        (f"{SP},tp --tensor-model-parallel-size 2 --sequence-parallel", OUT_A2A, "overlaps with tensor parallel"),
        (f"{SP} --attention-dropout 0.1", "attention: exchanges", "attention dropout is on"),
        (f"{SP} --cp-comm-type p2p", "attention: exchanges", "--cp-comm-type is p2p"),
        (f"{SP} --cp-comm-type all_gather --attention-dropout 0.1", GATHERS, "attention dropout is on"),
        (f"{SP} --cp-comm-type all_gather --transformer-impl local", GATHERS, "local attention has no all_gather"),
        (f"{SP} --num-attention-heads 31 --kv-channels 128", "attention: exchanges", "divisible by CP size"),
        (f"{EP} {FLEX} --moe-expert-capacity-factor 1.0", MOVED, "moe_expert_capacity_factor is 1.0 with the flex"),
        (f"{EP} {FLEX} --moe-flex-dispatcher-backend hybridep", MOVED, "moe_flex_dispatcher_backend is 'hybridep'"),
        (f"{EP} {FLEX} --moe-enable-deepep", FUSED, "rows are added up at each rank"),
        (f"{EP} --moe-router-dtype fp64", MOVED, "torch.float64 is not covered"),
        (
            f"{EP} --moe-router-padding-for-fp8 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
            MOVED,
            "are both on",
        ),
        (f"{EP} --overlap-moe-expert-parallel-comm", FUSED, "movement and GEMMs in nodes of their own"),
        (f"{EP} {FLEX} --overlap-moe-expert-parallel-comm", MOVED, "the flex dispatcher beside another microbatch"),
        (
            f"{EP} --overlap-moe-expert-parallel-comm --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1",
            MOVED,
            "beside tensor or context parallel kernels",
        ),
        (
            f"{EP} --overlap-moe-expert-parallel-comm --expert-tensor-parallel-size 2",
            MOVED,
            "beside tensor or context parallel kernels",
        ),
        (f"{EP} --cuda-graph-impl local", MOVED, "captured in a CUDA graph"),
        (f"{EP} --recompute-granularity selective --recompute-modules moe_act", FUSED, "moe_act is recomputed"),
        (f"{EP} --transformer-impl local", FUSED, "SequentialMLP computes expert by expert"),
        (f"{EP} --moe-use-legacy-grouped-gemm", FUSED, "GroupedMLP computes expert by expert"),
        (f"{EP} --tensor-model-parallel-size 2", FUSED, "experts are split over 2 tensor parallel ranks"),
        (
            f"{DENSE} --pipeline-model-parallel-size 2 --cuda-graph-impl local --cuda-graph-scope full_iteration",
            "messages between stages",
            "the whole iteration is captured",
        ),
        (
            f"{DENSE} --optimizer muon --muon-tp-mode distributed",
            "Newton-Schulz steps of matrices",
            "another algorithm",
        ),
    ],
)
def test_a_flag_keeps_a_part_native_in_the_words_of_the_log(words: str, part: str, says: str) -> None:
    assert says in (reasons(words)[part] or "")


FP8 = f"{TP} --ditron tp --fp8-format hybrid"
LINEARS = {QKV, PROJ, "MLP: linear_fc1", "MLP: linear_fc2"}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("sizes", ["", "--add-qkv-bias", "--fp8-format e4m3", "--ffn-hidden-size 10880"])
def test_every_layer_of_a_usual_job_in_fp8_is_fast(recipe: str, sizes: str) -> None:
    found = reasons(f"{FP8} --fp8-recipe {recipe} {sizes}")
    assert set(found) > LINEARS and set(found.values()) == {None}


@pytest.mark.parametrize(
    ("words", "native", "says"),
    [
        ("--fp8-recipe tensorwise --seq-length 8208", LINEARS, "4104 tokens a rank and (6144, 4096)"),
        ("--fp8-recipe delayed --ffn-hidden-size 10896", {"MLP: linear_fc2"}, "multiples of 16"),
        ("--fp8-recipe tensorwise --seq-length 8256", set(), ""),
        ("--fp8-recipe blockwise --seq-length 8256", LINEARS, "4128 tokens a rank and 4096 columns"),
        ("--fp8-recipe blockwise --seq-length 8256", LINEARS, "are not multiples of 128"),
        ("--fp8-recipe mxfp8", LINEARS, "FP8 by the recipe MXFP8BlockScaling"),
        ("--fp8-recipe custom", LINEARS, "FP8 by the recipe custom"),
        ("--fp8-recipe tensorwise --fp8-param-gather", set(), ""),
        ("--fp8-recipe blockwise --fp8-param-gather", set(), ""),
        ("--fp8-recipe delayed --fp8-param-gather", LINEARS, "(--fp8-param-gather)"),
        ("--fp8-recipe delayed --tp-comm-overlap", LINEARS, "userbuffers"),
    ],
)
def test_in_fp8_each_layer_is_asked_about_its_recipe_and_its_sizes(words: str, native: set[str], says: str) -> None:
    found = reasons(f"{FP8} {words}")
    assert {name for name, reason in found.items() if reason is not None} == native
    assert not says or any(says in (found[name] or "") for name in native)


def test_without_sequence_parallelism_layers_in_fp8_are_native() -> None:
    found = reasons(f"{FP8} --fp8-recipe tensorwise".replace("--sequence-parallel", ""))
    assert all(found[name] == "FP8 without --sequence-parallel" for name in LINEARS)


SP_FP8 = f"{SP} --fp8-format hybrid"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_projections_of_an_attention_in_fp8_are_native_between_fused_exchanges(recipe: str) -> None:
    found = reasons(f"{SP_FP8} --fp8-recipe {recipe}")
    assert found["attention: exchanges"] is None
    assert found[QKV_A2A] == found[OUT_A2A] == "the layer computes in FP8"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--fp8-recipe tensorwise", None),
        ("--fp8-recipe delayed --fp8-format e4m3", "the recipe is DelayedScaling"),
        ("--fp8-recipe blockwise", "the recipe is Float8BlockScaling"),
        ("--fp8-recipe tensorwise --fp8-param-gather", "the parameters are FP8 (--fp8-param-gather)"),
    ],
)
def test_grouped_quantization_of_experts_is_asked_as_the_layers_ask(words: str, says: str | None) -> None:
    found = reasons(f"{EP} --fp8-format hybrid {words}")
    assert found[MOVED] is None and found[FUSED] == "fp8 is on"
    assert found[QUANTISED] is None if says is None else says in (found[QUANTISED] or "")
    assert QUANTISED not in reasons(EP)


def test_the_projection_of_a_tensor_parallel_attention_is_fused_without_feature_tp() -> None:
    words = f"{SP} --tensor-model-parallel-size 2"
    assert reasons(words)[QKV_A2A] is None and reasons(f"{words} --sequence-parallel")[QKV_A2A] is None
    found = reasons(f"{words} --sequence-parallel".replace("--ditron sp", "--ditron sp,tp"))
    assert "overlap with tensor parallel communication" in (found[QKV_A2A] or "")


def test_other_parts_stay_fast_beside_one_that_is_native() -> None:
    found = reasons(f"{TP} --fp8-format hybrid --fp8-recipe tensorwise --ffn-hidden-size 11000")
    assert {name for name, reason in found.items() if reason} == {"MLP: linear_fc1", "MLP: linear_fc2"}
    found = reasons(f"{SP} --qk-layernorm")
    assert found[QKV_A2A] is None and found[OUT_A2A] is None and found["attention: exchanges"] is None


def test_features_that_have_nothing_to_do_are_named() -> None:
    report = examine_job(f"{TP} --ditron tp,pp,muon,ep --expert-model-parallel-size 2")
    assert {part.feature for part in report.parts} == {"tp"}
    text = " ".join(report.idle)
    for word in ("pp: nothing to accelerate", "--optimizer is adam", "ep: the model has no such layers"):
        assert word in text


def test_every_layer_of_a_model_with_shared_experts_and_latent_attention_is_asked() -> None:
    words = (
        f"{TP} --multi-latent-attention {LORA} --num-experts 8 --moe-layer-freq ([0]*1+[1]*7) "
        "--moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap --ditron tp"
    )
    found = reasons(words.replace("(", "'(").replace(")", ")'"))
    assert {"attention: linear_q_up_proj", "attention: linear_kv_up_proj", "MLP: linear_fc1", "output_layer"} <= set(
        found
    )
    assert "its communication is another's" in (found["shared experts: linear_fc1"] or "")


DEEPSEEK = (
    "pretrain_gpt.py --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    f"--multi-latent-attention {LORA} --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --seq-length 4096 --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
    "--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --mtp-num-layers 1 --bf16 "
    "--swiglu --disable-bias-linear --vocab-size 129280 --expert-model-parallel-size 8"
)
DEEPSEEK_PP = (
    "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1"
)
DEEPSEEK_LAYOUT = "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L'"
MAMBA = (
    "pretrain_mamba.py --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--seq-length 4096 --squared-relu --bf16 --disable-bias-linear --tensor-model-parallel-size 8 --sequence-parallel"
)
QWEN = f"{DENSE} --disable-bias-linear --qk-layernorm --attention-dropout 0 --context-parallel-size 8 --ditron sp"
A2A_P2P = f"{QWEN} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
MLA_SP = f"{DEEPSEEK.replace('--qk-layernorm', '')} --attention-dropout 0 --context-parallel-size 2 --cp-comm-type a2a"
HYBRID_SP = (
    "pretrain_mamba.py --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --disable-bias-linear "
    "--context-parallel-size 2 --cp-comm-type a2a --attention-dropout 0 --ditron sp --multi-latent-attention "
    "--q-lora-rank 512 --hybrid-layer-pattern"
)
OP_FUSER = "--use-transformer-engine-op-fuser"
TE_GRAPHS = "--cuda-graph-impl transformer_engine"
NEWTON_SCHULZ = "Newton-Schulz steps of matrices"
UP = {"attention: linear_q_up_proj", "attention: linear_kv_up_proj"}
MLP = {"MLP: linear_fc1", "MLP: linear_fc2"}
SHARED = {"shared experts: linear_fc1", "shared experts: linear_fc2"}
EH_PROJ, HEAD, STAGES = "multi-token prediction: eh_proj", "output_layer", "messages between stages"
IN_PROJ, OUT_PROJ, EXCHANGES = "Mamba: in_proj", "Mamba: out_proj", "attention: exchanges"


@pytest.mark.parametrize(
    ("words", "fused", "native"),
    [
        (
            f"{DEEPSEEK} {DEEPSEEK_PP} --tensor-model-parallel-size 2 --sequence-parallel --ditron tp,pp",
            {*UP, PROJ, *MLP, *SHARED, EH_PROJ, HEAD, STAGES},
            {},
        ),
        (f"{DEEPSEEK} {DEEPSEEK_LAYOUT} --ditron ep,pp", {MOVED, FUSED, STAGES}, {}),
        (f"{MLA_SP} --ditron sp", {EXCHANGES, OUT_A2A}, {QKV_A2A: "multi-latent attention"}),
        *(
            (
                f"{MLA_SP} {recomputed} --ditron sp",
                {EXCHANGES},
                {QKV_A2A: "multi-latent attention", OUT_A2A: "computed again in backward"},
            )
            for recomputed in ("--recompute-granularity selective", "--recompute-activations")
        ),
        (
            f"{FP8} --fp8-recipe tensorwise --cuda-graph-impl transformer_engine --cuda-graph-scope attn",
            {"MLP: linear_fc1", "MLP: linear_fc2", HEAD},
            dict.fromkeys((QKV, PROJ), "FP8 is calibrated or captured"),
        ),
        (
            f"{FP8} --fp8-recipe tensorwise --cuda-graph-impl local",
            {HEAD},
            dict.fromkeys(LINEARS, "FP8 is calibrated or captured"),
        ),
        (f"{MLA_SP} --experimental-attention-variant dsa --ditron sp", set(), {EXCHANGES: "the attention of dsa"}),
        (f"{A2A_P2P} 2 4", {EXCHANGES, QKV_A2A, OUT_A2A}, {}),
        (f"{MLA_SP} --cp-comm-type all_gather --ditron sp", set(), {GATHERS: "refuses multi-latent attention"}),
        (f"{QWEN} --cp-comm-type all_gather", {GATHERS}, {}),
        (f"{A2A_P2P} 1 8", set(), {EXCHANGES: "each exchange of a2a+p2p is of one rank"}),
        (f"{A2A_P2P} 2 2 2", set(), {EXCHANGES: "over 3 levels"}),
        (f"{A2A_P2P} 2 4 --transformer-impl local", set(), {EXCHANGES: "local attention has no a2a+p2p"}),
        (f"{QWEN} --cp-comm-type a2a --hybrid-context-parallel", set(), {EXCHANGES: "from batch to batch"}),
        (
            f"{QWEN} --cp-comm-type p2p a2a p2p a2a a2a a2a a2a a2a",
            {f"{name}, layers with a2a" for name in (EXCHANGES, QKV_A2A, OUT_A2A)},
            {f"{EXCHANGES}, layers with p2p": "--cp-comm-type is p2p"},
        ),
        (
            f"{MAMBA} --num-layers 56 --is-hybrid-model --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5",
            {IN_PROJ, OUT_PROJ, QKV, PROJ, *MLP, HEAD},
            {},
        ),
        (f"{MAMBA} --hybrid-layer-pattern 'M-M-|M-M-/MM'", {IN_PROJ, OUT_PROJ, *MLP, HEAD}, {}),
        (
            f"{MAMBA} --hybrid-layer-pattern 'M*M-|M*M-M' --pipeline-model-parallel-size 2",
            {IN_PROJ, OUT_PROJ, QKV, PROJ, *MLP, HEAD, STAGES},
            {},
        ),
        *(
            (
                f"{TP} --experimental-attention-variant {variant} --linear-attention-freq 4",
                {"gated delta net: in_proj", "gated delta net: out_proj", QKV, PROJ, *MLP, HEAD},
                {},
            )
            for variant in ("gated_delta_net", "gdn", "gdn2")
        ),
        (
            f"{MAMBA} --multi-latent-attention {LORA} --hybrid-layer-pattern M+M- --ditron tp",
            {IN_PROJ, OUT_PROJ, *UP, PROJ, *MLP, HEAD},
            {},
        ),
        (f"{HYBRID_SP} M+M-", {EXCHANGES, OUT_A2A}, {QKV_A2A: "multi-latent attention"}),
        (f"{HYBRID_SP} MDM-", set(), {EXCHANGES: "the attention of dsa"}),
        (f"{TP} --fp4-format e2m1", {HEAD}, dict.fromkeys(LINEARS, "NVFP4BlockScaling")),
        (
            f"{FP8} --fp8-recipe mxfp8 --first-last-layers-bf16",
            {HEAD, *(f"{name}, first and last layers in 16 bits" for name in LINEARS)},
            dict.fromkeys(LINEARS, "MXFP8BlockScaling"),
        ),
        (
            f"{TP} --fp32-residual-connection",
            {PROJ, "MLP: linear_fc2", HEAD},
            dict.fromkeys((QKV, "MLP: linear_fc1"), "another type than the input"),
        ),
        (f"{TP} --cpu-offloading-num-layers 2", {HEAD}, dict.fromkeys(LINEARS, "offloaded")),
        (f"{EP} --enable-cuda-graph", set(), {MOVED: "captured in a CUDA graph"}),
        (f"{EP} {TE_GRAPHS} --cuda-graph-scope attn moe_router", {MOVED, FUSED}, {}),
        (f"{EP} {TE_GRAPHS} --cuda-graph-modules attn moe_router", {MOVED, FUSED}, {}),
        (f"{EP} {TE_GRAPHS} --cuda-graph-scope moe_router moe_preprocess", set(), {MOVED: "captured in a CUDA graph"}),
        (f"{EP} {TE_GRAPHS}", set(), {MOVED: "captured in a CUDA graph"}),
        *(
            (f"{DENSE} --optimizer muon {option} --ditron muon", set(), {NEWTON_SCHULZ: says})
            for option, says in (
                ("--muon-use-syrk", "use_syrk=True"),
                ("--muon-coefficient-type aol", "coefficients 'aol'"),
                ("--tensor-parallel-num-weight-shards 2", "shared by 2 ranks"),
            )
        ),
        (f"{DENSE} --optimizer muon --muon-coefficient-type simple --ditron muon", {NEWTON_SCHULZ}, {}),
        *(
            (
                f"{TP} --tensor-parallel-num-weight-shards 4 --transformer-impl {impl} --ditron tp",
                set(),
                dict.fromkeys((*LINEARS, HEAD), "its weight is shared by 2 ranks"),
            )
            for impl in ("transformer_engine", "local")
        ),
        (f"{TP} --tensor-parallel-num-weight-shards 2 --ditron tp", {*LINEARS, HEAD}, {}),
        (f"{EP} --moe-layer-freq '[1]*8'", {MOVED, FUSED}, {}),
    ],
)
@pytest.mark.usefixtures("either_megatron")
def test_jobs_of_very_different_kinds(words: str, fused: set[str], native: dict[str, str]) -> None:
    found = reasons(words)
    assert {name for name, reason in found.items() if reason is None} == fused
    assert found.keys() - fused == native.keys()
    for name, says in native.items():
        assert says in (found[name] or "")


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0"])
def test_the_operation_fuser_computes_mlps_from_019_on(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ditron_train.runtime.versions.find_version", lambda entry: version)
    native = {name for name, reason in reasons(f"{TP} {OP_FUSER} --ditron tp").items() if reason is not None}
    assert native == (MLP if version == "0.19.0" else set())
    for others in ("--transformer-impl local", "--num-experts 8 --moe-layer-freq 2"):
        assert not any(reasons(f"{TP} {OP_FUSER} {others} --ditron tp").values())


def test_experts_that_are_not_split_run_beside_their_movement() -> None:
    assert reasons(f"{EP} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")[FUSED] is None
    gathered = f"{EP} --tensor-model-parallel-size 2".replace("alltoall", "allgather")
    assert reasons(gathered)[FUSED] is None


def test_slices_of_experts_without_expert_parallelism_are_gathered() -> None:
    words = f"{EP} --expert-model-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel"
    report = examine_job(words.replace("alltoall", "allgather"))
    assert {part.name: part.native_because for part in report.parts} == {MOVED: None, FUSED: None}
    assert report.idle == []
    for others in (words, f"{words} --expert-tensor-parallel-size 1".replace("alltoall", "allgather")):
        report = examine_job(others)
        assert report.parts == []
        assert report.idle == ["ep: nothing to accelerate where --expert-model-parallel-size is 1"]


def test_the_jobs_own_policy_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{EP} --overlap-moe-expert-parallel-comm"
    timed = "dispatch and combine are timed in the job's first steps"
    monkeypatch.setenv("DITRON_POLICY", "bits")
    assert reasons(words)[MOVED] is None and timed not in examine_job(words).to_text()
    assert timed in examine_job(f"{words} --ditron-policy strict").to_text()
    with pytest.raises(SettingError, match="--ditron-policy: 'quick': must be one of"):
        examine_job(f"{words} --ditron-policy quick")
    text = examine_job(words).to_text()
    assert "if its bits are native's, compared at its first call" in text and "faster" not in text


@pytest.mark.parametrize(
    ("words", "is_fused_natively"),
    [
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --disable-bias-linear --no-bias-swiglu-fusion", False),
        ("--swiglu --no-bias-gelu-fusion", True),
        ("", True),
        ("--no-bias-gelu-fusion", False),
        ("--disable-bias-linear", False),
        ("--squared-relu", True),
        ("--squared-relu --disable-bias-linear", False),
        ("--quick-geglu --disable-bias-linear", False),
    ],
)
def test_an_activation_is_fused_as_megatron_fuses_it(words: str, is_fused_natively: bool) -> None:
    from megatron.core.activations import squared_relu

    base = EP.replace("--swiglu ", "").replace("--disable-bias-linear ", "")
    config = config_of(f"{base} {words}".split())
    assert config.bias_activation_fusion == is_fused_natively
    assert (config.activation_func is squared_relu) == ("squared" in words)
    if "--disable-bias-linear" in words:
        assert reasons(f"{base} {words}")[FUSED] is None


def test_latent_attention_has_megatrons_default_ranks() -> None:
    config = config_of(f"{TP} --multi-latent-attention".split())
    assert (config.q_lora_rank, config.kv_lora_rank) == (None, 32)
    found = reasons(f"{TP} --multi-latent-attention")
    assert "attention: linear_q_proj" in found
    assert "at most 32 features" in (found["attention: linear_kv_up_proj"] or "")
    config = config_of(f"{TP} --multi-latent-attention {LORA}".split())
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)


def test_a_feature_that_was_not_asked_for_is_not_named() -> None:
    assert examine_job(f"{TP} --ditron tp").idle == []
    assert any(line.startswith("wgrad:") for line in examine_job(f"{TP} --ditron wgrad").idle)


def test_what_could_not_be_asked_is_said() -> None:
    report = examine_job(f"{TP} --ditron tp --heterogeneous-layers-config-path layers.json")
    assert any("--heterogeneous-layers-config" in line for line in report.idle)
    report = examine_job(f"{TP} --ditron tp --use-checkpoint-args --use-mp-args-from-checkpoint-args")
    assert any("not the checkpoint's" in line for line in report.idle)


def test_stages_of_uneven_sizes_have_to_be_asked_for() -> None:
    with pytest.raises(SettingError, match="61 layers do not divide over 16 stages"):
        examine_job(f"{DEEPSEEK} --pipeline-model-parallel-size 16")


def test_the_configuration_is_megatrons() -> None:
    """Field by field, where Megatron builds it without a GPU from the same values."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = config_of(f"{EP} --tensor-model-parallel-size 2 --sequence-parallel".split())
    simple = {
        name: value
        for name, value in vars(config).items()
        if name in TransformerConfig.__dataclass_fields__ and isinstance(value, (bool, int, float, str))
    }
    for wants_what_is_not_here in ("gradient_accumulation_fusion", "apply_rope_fusion"):
        simple.pop(wants_what_is_not_here)
    real = TransformerConfig(
        **{**simple, "activation_func": config.activation_func, "params_dtype": config.params_dtype}
    )
    different = {name: (value, getattr(real, name)) for name, value in simple.items() if getattr(real, name) != value}
    assert set(different) <= {"ffn_hidden_size", "moe_ffn_hidden_size", "cuda_graph_scope"}, different
    assert real.num_moe_experts == 8 and not real.add_bias_linear and real.gated_linear_unit


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num-layers 2", "--hidden-size"),
        (f"{DENSE} --ditron speed", "speed"),
        (f"{DENSE} 'open", "No closing quotation"),
        (f"{DENSE} --tensor-model-parallel-size 5", "do not divide"),
    ],
)
def test_what_is_no_job_is_refused_in_a_sentence(words: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        examine_job(words)


def test_it_prints_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    from ditron_train.cli import main

    assert main(["doctor", "--json", "--job", f"{TP} --ditron tp"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert {part["feature"] for part in parts} == {"tp"} and all(part["native_because"] is None for part in parts)
    text = examine_job(f"{TP} --add-qkv-bias --ditron tp").to_text()
    assert "native" in text and "fused" in text and QKV in text
    assert main(["doctor", "--job", "--num-layers 1"]) == 2
