"""The parts of `gpu_check.py`: what each of them checks or measures, one module each, and what they share."""
