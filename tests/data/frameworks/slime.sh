#!/bin/bash
# don't run this: an example
set -ex
NUM_GPUS=${NUM_GPUS:-8}
MODEL_DIR="tiny-gpt-oss"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint ${MODEL_DIR}
   #--hf-checkpoint /root/Qwen3-4B-FP8
   --ref-load /root/Qwen3-4B_torch_dist
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k.jsonl
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --rollout-max-response-len 64
   --rollout-temperature 0.7
)
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --use-tis)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-context-length 512
   --sglang-kv-cache-dtype fp8
)
MISC_ARGS=(
   --attention-dropout 0.0
   --attention-backend flash
)
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus ${NUM_GPUS} --disable-usage-stats
RUNTIME_ENV_JSON="{
  \"env_vars\": {\"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --colocate \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${MISC_ARGS[@]}
echo done
