set -x
MODEL_PATH="tiny-gpt-oss"
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path ${MODEL_PATH} \
   --reward.remote_url ${REWARD_FUNC_PATH} \
   --vllm.num_engines 8 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.75 \
   --vllm.enforce_eager \
   --actor.eps_clip_low_high 0.2 0.27 \
   --algo.advantage.is_correction_enable \
   --rollout.n_samples_per_prompt 4 \
   --rollout.max_new_tokens 64 \
   --rollout.temperature 0.7 \
   --ds.param_dtype bf16 \
   --ds.packing_samples \
   --ds.lora.rank 16 \
   --data.max_len 9216

# Options you may try:
#   --train.async_enable
