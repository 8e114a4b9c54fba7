"""Per-token dynamic E4M3 quantisation, alone and after RMSNorm."""
