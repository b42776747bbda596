"""Published measurements as steps that the transformer model can predict, by table.

Each reader turns the rows of one CSV into cases: a measured step, measured memory, or a reason why
the row is excluded. What a table does not state stands here once, with its reason. The shapes of
BigScience's rows are in bigscience_shapes.json, from the text that the rows' sources name.
"""

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer.architecture import Architecture
from paceline.perf.transformer.fitting import TimedStep

SHAPES = json.loads((Path(__file__).parent / "bigscience_shapes.json").read_text())["rows"]
VARIANTS = 1


@dataclass
class Case:
    """A row of a table."""

    table: str
    row: str
    machine: str
    step: TimedStep | None = None
    candidates: list = field(default_factory=list)  # plans, where the source does not say which
    memory: dict = field(default_factory=dict)  # measured, by kind
    excluded: str = ""
    is_fit: bool = True  # may be fitted; not if another program trained than in other rows


def read(folder, name):
    path = Path(folder) / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text):
    return float(text) if text not in ("", None) else None


def gpt(name, layers, hidden, heads, vocab, sequence, dropout=True):
    return Architecture(
        name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence,
        positions=sequence, dropout=dropout,
    )  # fmt: skip


def nodes_of(ranks, per_node=8):
    return -(-ranks // per_node)


MEGATRON = {"precision": "float16", "fused_attention": False, "overlap_data": False}


def korthikanti(folder):
    """Iteration times, and memory that the paper's formulas give."""
    cases = []
    for row in read(folder, "korthikanti_time_memory.csv"):
        tp, pp, v = int(row["tp"]), int(row["pp"]), int(row["interleave"])
        batch, mb = int(row["batch"]), int(row["microbatch"])
        model = gpt(row["model"], int(row["layers"]), int(row["hidden"]), int(row["heads"]),
                    51200, int(row["seq"]))  # fmt: skip
        name = f"{row['model']} {row['quantity']} ({row['mode']})"
        case = Case("korthikanti", name, "selene")
        sequence = "seq" in row["mode"] or row["mode"] in ("both", "any")
        selective = "selective" in row["mode"] or row["mode"] in ("both", "any")
        recompute = "full" if "full" in row["mode"] else "selective" if selective else "none"
        dp = int(row["gpus"]) // (tp * pp)
        plan = Plan(
            mesh=Mesh(data=dp, tensor=tp, pipeline=pp), nodes=nodes_of(int(row["gpus"])),
            microbatches=batch // mb // dp, stages_per_rank=v, sequence_parallel=sequence,
            recompute=recompute, **MEGATRON,
        )  # fmt: skip
        value = float(row["value"])
        case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=1.0)
        if row["quantity"] == "iteration_time":
            case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=value)
        elif row["quantity"] in ("params+optimizer", "activations"):
            case.memory = {row["quantity"]: value * 2**30}
        elif row["quantity"].startswith("activations relative"):
            case.memory = {"relative": value / 100}
        else:
            case.excluded = "a ratio that follows from the iteration time"
        if case.memory and row["quantity"] != "iteration_time":
            case.table = "korthikanti memory"
        cases.append(case)
    return cases


def sc21_flops(batch, seq, layers, hidden, vocab):
    """Narayanan et al. SC 2021, appendix: FLOPs of a step with full recomputation."""
    rest = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * seq * layers * hidden**2 * rest


def sc21_candidates(
    dp, tp, pp, batch, layers, gpus, microbatches=(1, 2, 4, 8, 16), variants=VARIANTS
):
    plans = []
    for mb in microbatches:
        if batch % (dp * mb):
            continue
        for v in range(1, variants + 1):
            if v > 1 and (pp == 1 or layers % (pp * v) or (batch // dp // mb) % pp):
                continue
            plans.append(Plan(
                mesh=Mesh(data=dp, tensor=tp, pipeline=pp), nodes=nodes_of(gpus),
                microbatches=batch // dp // mb, stages_per_rank=v, recompute="full",
                reduce_precision="bfloat16", **MEGATRON,
            ))  # fmt: skip
    return plans


def sc21(folder):
    """Weak scaling, and against ZeRO-3; recomputation in full."""
    cases = []
    for row in read(folder, "megatron_sc21_weak_scaling.csv"):
        layers, hidden, gpus = int(row["layers"]), int(row["hidden"]), int(row["gpus"])
        tp, pp, batch = int(row["tp"]), int(row["pp"]), int(row["batch"])
        flops = sc21_flops(batch, int(row["seq"]), layers, hidden, int(row["vocab"]))
        model = gpt(f"{row['params_b']}B", layers, hidden, int(row["heads"]), 51200, 2048)
        step_s = flops / gpus / float(row["tflops_per_gpu"]) / 1e12
        plans = sc21_candidates(gpus // tp // pp, tp, pp, batch, layers, gpus)
        cases.append(Case(
            "megatron sc21", f"T1 {row['params_b']}B {gpus} GPUs", "selene",
            TimedStep(model=model, plan=plans[0], batch=batch, step_s=step_s), plans,
        ))  # fmt: skip
    shapes = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
    for row in read(folder, "megatron_vs_zero3.csv"):
        layers, hidden, heads = shapes[row["params_b"]]
        gpus, batch, mb = int(row["gpus"]), int(row["batch"]), int(row["microbatch"])
        flops = sc21_flops(batch, 2048, layers, hidden, 51200)
        model = gpt(f"{row['params_b']}B", layers, hidden, heads, 51200, 2048)
        step_s = flops / gpus / float(row["tflops_per_gpu"]) / 1e12
        if row["scheme"] == "ZeRO-3":
            micro = batch // gpus // mb
            plans = [Plan(
                mesh=Mesh(data=gpus), nodes=nodes_of(gpus), microbatches=max(1, micro), zero=3,
                recompute="full", precision="float16", fused_attention=False,
                reduce_precision="bfloat16", overlap_data=False,  # DeepSpeed's default of 2021
            )]  # fmt: skip
        else:
            pp = int(row["model_parallel"]) // 8
            plans = sc21_candidates(gpus // 8 // pp, 8, pp, batch, layers, gpus, (mb,), 1)
        case = Case(
            "megatron sc21" if row["scheme"] != "ZeRO-3" else "deepspeed zero-3 (sc21)",
            f"T2 {row['scheme']} {row['params_b']}B {gpus} GPUs", "selene",
            TimedStep(model=model, plan=plans[0], batch=batch, step_s=step_s), plans,
        )  # fmt: skip
        case.is_fit = row["scheme"] != "ZeRO-3"
        cases.append(case)
    return cases


MPT = {  # name: layers, hidden, heads; llm-foundry scripts/train/benchmarking/README.md
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip


def mpt(folder):
    """Training with FSDP on three machines."""
    cases = []
    for row in read(folder, "llm_foundry_mpt_fsdp.csv"):
        machine = {"H100-80GB": "mosaic-h100", "A100-80GB": "mosaic-a100-80",
                   "A100-40GB": "mosaic-a100-40"}.get(row["machine"].split()[0])  # fmt: skip
        gpus, seq = int(row["# GPUs"]), int(row["SeqLen (T)"])
        name = f"{row['Model']} {seq} {gpus} GPUs {row['Precision']}"
        case = Case("mpt", name, machine or "")
        cases.append(case)
        if row["Model"] not in MPT or machine is None:
            case.excluded = "its shape or machine is not known"
            continue
        if row["Activation CPUOffload"] == "True":
            case.excluded = "activations on the host"
            continue
        layers, hidden, heads = MPT[row["Model"]]
        model = Architecture(
            name=f"mpt-{row['Model']}", layers=layers, hidden=hidden, heads=heads, vocab=50368,
            sequence=seq, positions=seq, biases=False,
        )  # fmt: skip
        pure = row["MP Mode"] == "PURE"
        plan = Plan(
            mesh=Mesh(data=gpus), nodes=nodes_of(gpus), microbatches=int(row["GradAccum"]),
            precision="float8" if "fp8" in row["Precision"] else "bfloat16",
            zero=3 if row["Sharding Strategy"] == "FULL_SHARD" else 2,
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            reduce_precision="bfloat16" if pure else "float32",
        )  # fmt: skip
        batch = int(row["GlobalBatchSize"])
        step_s = batch * seq / gpus / float(row["Throughput (T/s/GPU)"])
        case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=step_s)
    return cases


LLAMA = {  # layers, hidden, heads, kv heads, ffn; Llama 3 herd, table 3
    "8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672),
    "405B": (126, 16384, 128, 8, 53248),
}  # fmt: skip


def torchtitan(folder):
    """Llama 3 with FSDP, tensor, context and pipeline parallelism.

    Its rows name torch of 2024-12-23, whose context parallelism gives ranks equal shares of causal
    attention by default (pytorch/pytorch#141429, #132442).
    """
    cases = []
    for row in read(folder, "torchtitan_llama3.csv"):
        machine = "whitefiber-h200" if row["machine"].startswith("H200") else "torchtitan-h100"
        gpus, seq = int(row["gpus"]), int(row["seq"])
        name = f"{row['model']} {row['parallelism']} {seq} {row['precision']} {row['recompute']}"
        case = Case("torchtitan", f"{name} {row['table']}", machine)
        cases.append(case)
        axes = {
            key: int(value)
            for key, value in re.findall(r"(FSDP|TP|PP|CP)(\d+)", row["parallelism"])
        }
        tp, pp, cp = (axes.get(axis, 1) for axis in ("TP", "PP", "CP"))
        dp = axes.get("FSDP", 1)
        if dp * tp * pp * cp != gpus:
            case.excluded = f"{row['parallelism']} is not {gpus} GPUs"
            continue
        layers, hidden, heads, kv, ffn = LLAMA[row["model"].rsplit("-", 1)[1]]
        model = Architecture(
            name=row["model"], layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn,
            vocab=128256, sequence=seq, gated=True, tied=False, rotary=True, biases=False,
        )  # fmt: skip
        local = int(row["local_batch"])
        recompute = {"full": "full", "selective": "operators"}.get(row["recompute"], "operators")
        plan = Plan(
            mesh=Mesh(data=dp, tensor=tp, pipeline=pp, context=cp), nodes=nodes_of(gpus),
            microbatches=pp if pp > 1 else 1, zero=2 if pp > 1 else 3, recompute=recompute,
            precision="float8" if "float8" in row["precision"] else "bfloat16",
            sequence_parallel=tp > 1, compiled=row["compile"] == "yes",
            overlap_tensor="sync" in row["extra"].lower(),
            stages_per_rank=2 if "nterleaved" in row["extra"] else 1,
        )  # fmt: skip
        batch = local * dp
        step_s = batch * seq / gpus / float(row["tps_per_gpu"])
        case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=step_s)
        if row["peak_mem_gib"]:
            case.memory = {"peak": float(row["peak_mem_gib"]) * 2**30}
        if "rowwise" in row["precision"]:
            case.excluded = "scales of rows: other kernels than those of the peak rate"
    return cases


def nanotron(folder):
    """A Llama of 1 billion parameters in three dimensions.

    Shape, optimizer and order are those of huggingface/bench_cluster (create_configs.py,
    template/base_config.py): vocabulary of GPT-2 as it is, ZeRO-1, gradients summed in 32 bits.
    nanotron's stages send and receive one message after the other and compute nothing meanwhile
    (src/nanotron/parallel/pipeline_parallel/state.py, p2p.py).
    """
    cases = []
    model = Architecture(
        name="llama-1B", layers=24, hidden=2048, heads=32, ffn=4096, vocab=50257, sequence=4096,
        gated=True, rotary=True, biases=False,
    )  # fmt: skip
    for row in read(folder, "nanotron_llama1b_3d.csv"):
        dp, tp, pp, mb = (int(row[key]) for key in ("dp", "tp", "pp", "microbatch"))
        gpus, batch = int(row["gpus"]), int(row["global_batch"])
        plan = Plan(
            mesh=Mesh(data=dp, tensor=tp, pipeline=pp), nodes=nodes_of(gpus),
            microbatches=batch // dp // mb, sequence_parallel=tp > 1, precision="bfloat16",
            zero=1, overlap_pipeline=False, layers=nanotron_stages(model, pp),
            padded_vocabulary=False,
        )  # fmt: skip
        case = Case("nanotron", f"{gpus} GPUs dp{dp} tp{tp} pp{pp} mb{mb}", "hf-h100")
        case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=float(row["step_s"]))
        case.memory = {"peak": float(row["peak_alloc_mib"]) * 2**20}
        cases.append(case)
    return cases


def nanotron_stages(model, pp):
    """Return the layers of each stage: a stage is full with the block that exceeds its share.

    Blocks count by their weights (nanotron's build_model and get_block_compute_costs).
    """
    if pp == 1:
        return ()
    output = model.vocab * model.hidden / model.layer_matrix_parameters
    sizes = [0] * pp
    stage = 0
    for layer in range(model.layers):
        sizes[stage] += 1
        stage += layer + 1 > (model.layers + output) * (stage + 1) / pp
    return tuple(sizes)


def bigscience_flops(model, batch):
    """FLOPs of a step with full recomputation, as the rows count them."""
    return sc21_flops(batch, model.sequence, model.layers, model.hidden, model.vocab)


def bigscience_a100(folder):
    """Megatron-DeepSpeed on Jean Zay: ZeRO-1, full recomputation, a vocabulary of 250880."""
    cases = []
    for row in read(folder, "bigscience_a100_200B_2048seq.csv"):
        line = int(row["source"].rsplit(" ", 1)[1])
        shape = SHAPES.get(str(line))
        case = Case(
            "bigscience a100",
            f"line {line} {row['Size']} DP{row['DP']} TP{row['TP']} PP{row['PP']} MBS{row['MBS']}",
            "jean-zay-a100",
        )
        cases.append(case)
        sizes = [number(row[key]) for key in ("DP", "TP", "PP", "MBS", "GBS", "Sec/it")]
        if None in sizes or shape is None:
            case.excluded = "its plan, shape or time is not stated"
            continue
        dp, tp, pp, mb, batch = (int(size) for size in sizes[:5])
        gpus = int(number(row["GPUs"]) or 8 * number(row["Nodes"]))
        if dp * tp * pp != gpus:
            case.excluded = f"DP {dp} x TP {tp} x PP {pp} is not {gpus} GPUs"
            continue
        hidden, layers, heads = shape
        model = gpt(f"{row['Size']}", layers, hidden, heads, 250880, 2048)
        rate = number(row["TFLOPs"])
        implied = bigscience_flops(model, batch) / gpus / sizes[5] / 1e12
        if rate and not 0.9 < implied / rate < 1.12:
            case.excluded = (
                f"its {rate} TFLOP/s are not its seconds ({implied:.0f} by its shape and batch)"
            )
            continue
        plan = Plan(
            mesh=Mesh(data=dp, tensor=tp, pipeline=pp), nodes=nodes_of(gpus),
            microbatches=max(1, batch // dp // mb), recompute="full",
            zero=0 if row["ZS"] == "0" else 1,
            reduce_precision="float32" if line > 895 else "bfloat16",
            layers=bigscience_stages(layers, pp, line), **MEGATRON,
        )  # fmt: skip
        case.step = TimedStep(model=model, plan=plan, batch=batch, step_s=sizes[5])
        memory = re.match(r"(\d+)GB", row["Mem"])
        if memory:
            case.memory = {"peak": float(memory[1]) * 1e9}
    return cases


def bigscience_stages(layers, pp, line):
    """Return the layers of each stage: equal, or as lines 875 and 900 say.

    Line 875: of 78 layers in 12 stages, the last has 1 and the others 7. From line 887 on an
    embedding counts as a layer, so that the first and the last stage have one fewer.
    """
    if pp == 1:
        return ()
    if line >= 887 and (layers + 2) % pp == 0:
        each = (layers + 2) // pp
        return (each - 1, *([each] * (pp - 2)), each - 1)
    if layers % pp == 0:
        return ()
    each = -(-layers // pp)
    sizes = [each] * (layers // each)
    sizes += [layers - sum(sizes)] if layers % each else []
    return tuple(sizes) if len(sizes) == pp else ()


def bigscience_v100(folder):
    """Excluded: shapes are not stated, and the authors state 40 % of noise."""
    return [
        Case("bigscience v100", row["source"].rsplit(" ", 1)[1], "jean-zay-v100",
             excluded="hidden width, layers and heads are not stated; authors state 40 % of noise")
        for row in read(folder, "bigscience_v100_gpt2_1024seq.csv")
    ]  # fmt: skip


def zero(folder):
    """Model states, by the formula of the paper's table 1."""
    cases = []
    for row in read(folder, "zero_memory.csv"):
        case = Case("zero", f"{row['params_b']}B {row['stage']} dp {row['dp']}", "")
        case.memory = {
            "gb": float(row["gb_per_device"]), "parameters": float(row["params_b"]) * 1e9,
            "stage": {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}[row["stage"]], "dp": int(row["dp"]),
        }  # fmt: skip
        cases.append(case)
    return cases


STEP_TABLES = (korthikanti, sc21, mpt, torchtitan, nanotron, bigscience_a100, bigscience_v100)
