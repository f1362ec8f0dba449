"""``python -m tessera_gateway``, which `tessera serve` starts as its child."""

from tessera_gateway.cli import gateway_main

if __name__ == "__main__":
    raise SystemExit(gateway_main())
