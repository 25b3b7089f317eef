# SPDX-License-Identifier: Apache-2.0
"""The mathematics of RL on flow-matching models: pure functions of torch tensors and the standard library.

| module | answers |
| --- | --- |
| `sde` | one denoising step: where it lands and with which log-density |
| `window` | which steps of a group are stochastic, and which are trained |
| `noise` | the noise of one sample at one step, whoever generates it |
| `advantages` | rewards of groups -> advantages |
| `losses`, `kl` | log-probs and advantages of rows -> loss; `rows` holds what both reduce with |
| `ema` | an exponential moving average of the weights |

Import the modules (`from verl_digen.algorithms import sde`); this package itself imports nothing.
"""
