"""Launch lines as people have them in their repositories, each with its source.

`{port}` and `{cwd}` are filled in; sizes are two ranks a node and two nodes at most: the machine is
small. Anything else is as it was written there, with the training's own arguments shortened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Form(NamedTuple):
    """`script` is a bash script; `ranks` how many there are in all; `code` what both launchers end with.

    `exclusive`: the port can't be chosen, so the two launchers have to take turns.
    """

    name: str
    seen: str
    ranks: int
    script: str
    environment: Mapping[str, str] = MappingProxyType({})
    code: int = 0
    exclusive: bool = False


def renamed(script: str) -> str:
    """The same script with our launcher's name in the place of torch's, and nothing else changed."""
    script = script.replace("torch.distributed.launch", "aegis_elastic.launch.launch")
    script = script.replace("torch.distributed.run", "aegis_elastic.launch.run")
    return re.sub(r"\btorchrun\b", "aegis-run", script)


FORMS = (
    Form("bigscience", "bigscience/train/tr11-176B-ml", 4, r"""
MASTER_ADDR=localhost
MASTER_PORT={port}
GPUS_PER_NODE=2
NNODES=2
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --tee 3 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size 2 \
    --save checkpoints/tr11 \
    "
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a main_log.txt
"""),
    Form("ml-engineering", "ml-engineering/orchestration/slurm/launchers", 4, r"""
LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node 2 \
    --nnodes 2 \
    --rdzv_endpoint localhost:{port} \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --role $(hostname -s | tr -dc '0-9'): \
    --tee 3 \
    "
srun --wait=60 --kill-on-bad-exit=1 bash -c "$LAUNCHER --node_rank \$SLURM_PROCID pretrain_gpt.py --lr 1e-4"
"""),
    Form("distributed.launch", "Megatron's academic scripts, bigscience", 2, r"""
GPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT={port}
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes 1 --node_rank 0 \
 --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py --num-layers 24 --fp16
"""),
    Form("distributed.launch --use_env", "bigscience/experiments/bandwidth", 2, r"""
python -u -m torch.distributed.launch --use_env --nproc_per_node=2 --master_port={port} pretrain_gpt.py --fp16
"""),
    Form("Megatron", "Megatron-LM/examples/gpt3/train_gpt3_175b_distributed.sh", 2, r"""
GPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT={port}
NUM_NODES=1
NODE_RANK=0
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_PARALLEL_ARGS[@]} --data-path "a b" ''
"""),
    Form("Megatron on two nodes", "Megatron-LM/examples, with NODE_RANK from the scheduler", 4, r"""
run() {
  torchrun --nproc_per_node 2 --nnodes 2 --node_rank $1 --master_addr localhost --master_port {port} \
    pretrain_gpt.py --use-mcore-models
}
run 0 & first=$!
run 1 & second=$!
wait $first && wait $second
"""),
    Form("Megatron's functional tests", "Megatron-LM/tests/functional_tests/shell_test_utils", 2, r"""
export CUDA_DEVICE_MAX_CONNECTIONS=1
OUTPUT_PATH={cwd}/output
DISTRIBUTED_ARGS=(
    --max-restarts=3
    --log-dir $OUTPUT_PATH/logs/1
    --tee "0:3,1:3"
    --redirects "3"
    --nproc_per_node 2
    --nnodes 1
    --node_rank 0
    --master_addr localhost
    --master_port {port}
)
mkdir -p $OUTPUT_PATH/logs/1
python -m torch.distributed.run ${DISTRIBUTED_ARGS[@]} \
    --no-python ./pretrain_program --train-iters 50 && EXIT_CODE=0 || EXIT_CODE=$?
exit $EXIT_CODE
"""),
    Form("standalone with logs", "Megatron-LM/examples/mimo/scripts", 2, r"""
TORCHRUN_LOG_DIR=logs/mimo
torchrun \
    --standalone \
    --nproc-per-node 2 \
    --log-dir "${TORCHRUN_LOG_DIR}" \
    --redirects 3 \
    --tee 3 \
    -m examples.mimo.train --dataset-provider mock
"""),
    Form("pytest", "Megatron-LM and torchtitan's CI", 2, r"""
torchrun --nproc-per-node=2 -m pytest -q -p no:cacheprovider --noconftest -c /dev/null pretrain_gpt.py
"""),
    Form("torchtitan", "torchtitan/run_train.sh", 2, r"""
NGPU=${NGPU:-"2"}
export LOG_RANK=${LOG_RANK:-0}
PYTORCH_ALLOC_CONF="expandable_segments:True" \
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
    --local-ranks-filter ${LOG_RANK} --role rank --tee 3 \
    -m torchtitan.train --job.config_file ./debug_model.toml "$@"
"""),
    Form("torchtitan with Slurm", "torchtitan/multinode_trainer.slurm", 4, r"""
head_node_ip=127.0.0.1
export LOGLEVEL=INFO
srun torchrun --nnodes 2 --nproc_per_node 2 --rdzv_id 101 --rdzv_backend c10d \
    --rdzv_endpoint "$head_node_ip:{port}" -m torchtitan.train --module llama3
"""),
    Form("virtual local rank", "torchtitan/experiments/graph_trainer", 2, r"""
torchrun --virtual-local-rank --nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
    --role rank --tee 3 -m torchtitan.train --compile
"""),
    Form("numa-set.sh", "ml-engineering/training/performance", 2, r"""
torchrun --nproc_per_node=2 --role : --tee 3 --no-python ./numa-set.sh pretrain_gpt.py --bf16
"""),
    Form("endpoint without a port", "ml-engineering/stabs/incoming.md", 2, r"""
FIRST_HOST=localhost
bash -c "torchrun --nproc_per_node 2 --nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=$FIRST_HOST \
  pretrain_gpt.py"
""", exclusive=True),
    Form("NeMo-Run", "NeMo-Run's torchrun component", 4, r"""
for node_rank in 0 1; do
  torchrun --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id 4711 --nnodes 2 \
    --nproc-per-node 2 --node-rank $node_rank --max-restarts 0 --tee 3 --role "" pretrain_gpt.py --seq 8 &
  pids="${pids:-} $!"
done
for pid in $pids; do wait $pid || exit $?; done
"""),
    Form("elastic", "Kubernetes examples of torchelastic", 4, r"""
start() {
  torchrun --nnodes 1:2 --nproc_per_node 2 --rdzv_id job-1 --rdzv_backend c10d \
    --rdzv_endpoint localhost:{port} --rdzv-conf join_timeout=1200,last_call_timeout=60,timeout=300 \
    --max_restarts 100 pretrain_gpt.py --resume
}
start & first=$!
start & second=$!
wait $first && wait $second
"""),
    Form("Kubeflow", "PyTorchJob and Trainer v2: everything through PET_", 2, r"""
torchrun pretrain_gpt.py --from env
""", {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "kubeflow",
      "PET_RDZV_ENDPOINT": "localhost:{port}", "PET_MAX_RESTARTS": "10", "PET_NODE_RANK": "0"}),
    Form("PYTHON_EXEC", "torchrun's own documentation", 2, r"""
PYTHON_EXEC=./python-in-a-container torchrun --standalone --nproc-per-node=2 -- pretrain_gpt.py -- --x
"""),
    Form("a rank fails", "any of them, on a bad day", 2, r"""
torchrun --standalone --nproc_per_node 2 --max_restarts 0 --log-dir logs --redirects 3 pretrain_gpt.py
""", {"CORPUS_EXIT": "1:3"}, code=1),
)  # fmt: skip
