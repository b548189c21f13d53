"""FedGenP and FedGen: generators of latents, added to the rounds of any strategy."""
