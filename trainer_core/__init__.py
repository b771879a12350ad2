"""A compact, full trainer for the Llama-3 family: FSDP2/HSDP, TP, PP, CP, compile, Float8, activation checkpointing."""
