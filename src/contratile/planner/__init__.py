"""What a run will need, before it starts: GPUs and their rates, and the time of the kernels. All of it is predicted."""
