"""FedGenP and FedGen: generators of latents beside the rounds of any strategy."""
