"""The torchelastic rendezvous handler `aegis`: the control plane under the stock launcher."""
