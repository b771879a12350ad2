#!/bin/bash

# Parameters
#SBATCH --account='sp ace '"'"'single'"'"' "double" $HOME `id` $(id) ; , # % \\ \\\\ ünï ☃ -x =*?'
#SBATCH --array=0-2%3
#SBATCH --comment='sp ace '"'"'single'"'"' "double" $HOME `id` $(id) ; , # % \\ \\\\ ünï ☃ -x =*?'
#SBATCH --constraint='[rack1|rack2]&ib'
#SBATCH --gres=gpu:4
#SBATCH --job-name=meshmark-x-0
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/results with space/.jobs/meshmark-x-0/%A_%a.log'
#SBATCH --partition=a,b
#SBATCH --qos='a;b'
#SBATCH --requeue
#SBATCH --reservation='it'"'"'s'
#SBATCH --signal=B:USR2@120
#SBATCH --spread-job

# setup
export NCCL_SOCKET_IFNAME='sp ace '"'"'single'"'"' "double" $HOME `id` $(id) ; , # % \ \\ ünï ☃ -x =*?'
export PLAIN=1
source /etc/profile.d/modules.sh
export PYTHONPATH=@ROOT@${PYTHONPATH:+:$PYTHONPATH}

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ -m sweeps.task '/shared/results with space/.jobs/meshmark-x-0'
