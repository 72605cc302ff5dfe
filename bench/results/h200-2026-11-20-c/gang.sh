#!/usr/bin/env bash
# Two ranks that train together over NCCL, each on its GPU of a machine with two, and a rival that saturates each GPU.
#
#   gang.sh gang|none       the ranks as a gang, or as two programs that know nothing of each other
#
# Wants PyTorch with CUDA, and nvshare installed.  gang.txt is what it printed.
set -u
export NVSHARE_MEMORY=device NVSHARE_RUNTIME_DIR="${NVSHARE_RUNTIME_DIR:-$(mktemp -d)}"
programs="$(mktemp -d)"
cat >"$programs/rank.py" <<'P'
import json, os, sys, time
import torch
import torch.distributed as dist

rank, seconds = int(sys.argv[1]), float(sys.argv[2])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3], RANK=str(rank), WORLD_SIZE="2")
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2)
weights = torch.randn(2048, 2048, device=f"cuda:{rank}", dtype=torch.bfloat16)
gradients = torch.ones(8 << 20, device=f"cuda:{rank}")
stop = torch.zeros(1, device=f"cuda:{rank}")


def step():
    product = weights
    for _ in range(20):
        product = (weights @ product) * 0.01
    dist.all_reduce(gradients)
    gradients.mul_(0.5)
    torch.cuda.synchronize()


for _ in range(3):
    step()
dist.barrier()
torch.cuda.synchronize()
begin, steps, worst = time.time(), 0, 0.0
while True:
    before = time.time()
    step()
    steps, worst = steps + 1, max(worst, time.time() - before)
    if steps % 10 == 0:
        stop.fill_(float(time.time() - begin > seconds))
        dist.all_reduce(stop)
        if stop.item() > 0:
            break
print(json.dumps({"rank": rank, "steps": steps, "per_s": steps / (time.time() - begin), "worst_s": worst}), flush=True)
dist.destroy_process_group()
P
cat >"$programs/rival.py" <<'P'
import json, sys, time
import torch

gpu, seconds = int(sys.argv[1]), float(sys.argv[2])
torch.cuda.set_device(gpu)
matrix = torch.randn(2048, 2048, device=f"cuda:{gpu}", dtype=torch.bfloat16)
begin, steps = time.time(), 0
while time.time() - begin < seconds:
    for _ in range(50):
        matrix @ matrix
    torch.cuda.synchronize()
    steps += 1
print(json.dumps({"rival": gpu, "per_s": steps / (time.time() - begin)}), flush=True)
P
gang=()
[ "$1" = gang ] && gang=(--gang=pair)
port=$((29500 + RANDOM % 400))
for gpu in 0 1; do nvshare-run --name="rival$gpu" -- python3 "$programs/rival.py" "$gpu" 26 & done
sleep 3
for gpu in 0 1; do
  nvshare-run --name="rank$gpu" "${gang[@]}" -- timeout 60 python3 "$programs/rank.py" "$gpu" 12 "$port" &
done
sleep 16
nvshare-ctl status --json
wait
