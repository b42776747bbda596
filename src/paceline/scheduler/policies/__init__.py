"""Policies: each module holds one, with its formula and source; `POLICIES` names them all."""
