#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --job-name=meshmark-x-0
#SBATCH --mem=4G
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/results with space/.jobs/meshmark-x-0/%A_%a.log'
#SBATCH --partition=test
#SBATCH --requeue
#SBATCH --signal=B:USR2@60
#SBATCH --time=30

# setup
export PYTHONPATH=@ROOT@${PYTHONPATH:+:$PYTHONPATH}

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ -m sweeps.task '/shared/results with space/.jobs/meshmark-x-0'
