"""FedAvg as Flower ships it, with the classifier of Paceline's simulation on digits."""
