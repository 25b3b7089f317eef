# SPDX-License-Identifier: Apache-2.0
"""The mathematics of RL on flow-matching models: pure functions of torch tensors and the standard library.

| module | holds |
| --- | --- |
| `sde` | one denoising step and its log-density |
| `window` | the stochastic steps of a group, and the trained ones among them |
| `noise` | the noise of one sample at one step, the same on every worker |
| `advantages` | rewards of groups -> advantages |
| `losses`, `kl` | log-probs and advantages of rows -> loss; `rows` holds their shared reduction |
| `ema` | an exponential moving average of the weights |

Import the modules (`from verl_digen.algorithms import sde`); this package itself imports nothing.
"""
