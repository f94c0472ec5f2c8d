"""The accounting of a step's trace: families, overlap, idle time."""
import re

from conftest import ROOT

from records.tools.profile import account, family, table


def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur}


def test_families_of_kernels():
    assert family("ncclDevKernel_ReduceScatter_Sum_bf16") == "communication"
    assert family("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT") == "matmul"
    assert family("kernel_cutlass_flash_attncuteflash_fwd_sm90") == "attention"
    assert family("attention_key_kernel") == "attention"
    assert family("pointer_kernel") == family("pointer_query_kernel") == "copy head"
    assert family("triton_red_fused__fused_rms_norm__to_copy_add_cat_mul_0") == "elementwise"
    assert {family(f"{name}_kernel") for name in ("residual", "residual_backward", "shared_rows", "row_norms",
                                                  "mlp_scales", "smear", "gradient_scales", "scaled",
                                                  "add_scaled")} == {"elementwise"}
    assert family("gradient_kernel") == "loss" and family("add_blocks_kernel") == "embedding"
    assert {family(name) for name in ("heads_kernel", "heads_backward_kernel", "value_mix_kernel",
                                      "value_mix_backward_kernel")} == {"elementwise"}
    assert family("triton_red_fused__to_copy_clamp_lerp_linalg_vector_norm_mean_mul_3") == "optimizer"
    assert {family(f"{name}_kernel") for name in ("row_adam", "adam", "momentum", "neuron_squares",
                                                  "neuron_update", "feature")} == {"optimizer"}
    assert family("Memcpy PtoP (Device -> Device)") == "communication"
    assert family("Memcpy HtoD (Pinned -> Device)") == family("quantize_weights_kernel") == "copies"
    ours = {name for path in (ROOT / "kernels").rglob("*.py")
            for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert len(ours) > 30 and not [name for name in ours if family(name) == "other"]
    assert family("something new") == "other"


def test_communication_is_hidden_while_others_run_and_gaps_are_idle():
    events = [kernel("gemm", 0, 4000), kernel("ncclReduceScatter", 3000, 3000),
              kernel("triton_fused", 7000, 1000), kernel("triton_fused", 7500, 1000),
              kernel("cpu_op", 0, 99_000, cat="cpu_op"), {"name": "no category"}]
    assert account(events) == {"matmul": 4.0, "elementwise": 1.5, "communication exposed": 2.0,
                               "communication hidden": 1.0, "idle": 1.0, "wall": 8.5}
    assert account([]) == {}


def test_table_has_a_row_a_family_and_ends_with_the_wall():
    lines = table({"a": {"matmul": 1.0, "idle": 0.5, "wall": 1.5},
                   "b": {"loss": 2.0, "idle": 0.0, "wall": 2.0}}).splitlines()
    assert lines[0] == "| ms     |    a |    b |" and lines[2] == "| matmul | 1.00 | 0.00 |"
    assert lines[-1] == "| wall   | 1.50 | 2.00 |"
