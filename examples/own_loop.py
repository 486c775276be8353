import sys

import torch

import nolocod

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
folder, *others = sys.argv[1:]
run = {"inner": {"steps": 1000}}  # inner steps between two outer steps
swarm = nolocod.join(data_dir=folder, bootstrap=others) if others else nolocod.create(model, data_dir=folder, run=run)
with swarm:
    print("others join through", swarm.addresses[0], flush=True)
    opt = nolocod.NoLoCo(model.parameters(), torch.optim.AdamW(model.parameters()), swarm=swarm)
    while True:
        x = torch.randn(256, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        loss.backward()
        opt.step(loss=loss)
        opt.zero_grad()
