"""What runs inside one rank process: scheduler, step loop, model runner, sampler."""
