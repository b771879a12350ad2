#!/bin/bash

# Parameters
#SBATCH --account=my-project
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:4
#SBATCH --job-name=meshmark-x-0
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/results with space/.jobs/meshmark-x-0/%A_%a.log'
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=240

# setup
export NCCL_DEBUG=WARN
export NCCL_IB_HCA=mlx5
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
ulimit -l unlimited
export PYTHONPATH=@ROOT@${PYTHONPATH:+:$PYTHONPATH}

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ -m sweeps.task '/shared/results with space/.jobs/meshmark-x-0'
