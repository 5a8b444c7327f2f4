namespace Tidemill.Samples
{
    /// <summary>
    /// Agents come and go in corridors of seven cells; each is to press the button at the end that is its goal. Two branches of actions, of which what would do
    /// nothing is forbidden. All on one thread.
    /// </summary>
    public sealed class Corridor : Program
    {
        private const int Slots = 10;
        private const int Last = 6;
        private const int LongestEpisode = 30;

        private sealed class Agent
        {
            public bool Playing;
            public int Wait;
            public int Id;
            public int Cell;
            public int Goal;
            public int Steps;
            public double Return;
            public int Move, Press;

            public bool AtEnd { get { return Cell == 0 || Cell == Last; } }
        }

        private readonly World world;
        private readonly Agent[] agents = new Agent[Slots];
        private int nextId;

        public Corridor(string[] arguments) : base(arguments, Slots)
        {
            world = Bridge.Add(new World("corridor", Slots, new[] { new[] { Last + 3 } }, 0, 3, 2));
            world.Heuristic = Walk;
            for (int slot = 0; slot < Slots; slot++)
            {
                agents[slot] = new Agent { Wait = slot + 1 };
            }
        }

        protected override void Reset()
        {
            base.Reset();
            for (int slot = 0; slot < Slots; slot++)
            {
                agents[slot].Playing = false;
                agents[slot].Wait = slot + 1;
            }
        }

        protected override void Tick()
        {
            foreach (ActionEvent action in world.Actions)
            {
                foreach (Agent agent in agents)
                {
                    if (agent.Playing && agent.Id == action.AgentId)
                    {
                        agent.Move = action.Discrete[0];
                        agent.Press = action.Discrete[1];
                    }
                }
            }
            for (int slot = 0; slot < Slots; slot++)
            {
                if (agents[slot].Playing)
                {
                    Act(slot, agents[slot]);
                }
                else if (--agents[slot].Wait == 0)
                {
                    Arrive(slot, agents[slot]);
                }
            }
        }

        private void Arrive(int slot, Agent agent)
        {
            agent.Playing = true;
            agent.Goal = (Random.Next(slot) & 1) != 0 ? 1 : -1;
            agent.Cell = 3;
            agent.Steps = 0;
            agent.Return = 0;
            agent.Id = nextId++;
            Ask(agent, 0);
        }

        private void Act(int slot, Agent agent)
        {
            agent.Steps++;
            bool pressed = agent.Press == 1 && agent.AtEnd;
            double reward = -0.02;
            if (pressed)
            {
                reward += agent.Cell == (agent.Goal > 0 ? Last : 0) ? 1 : -1;
            }
            else if (agent.Move == 1 && agent.Cell > 0)
            {
                agent.Cell--;
            }
            else if (agent.Move == 2 && agent.Cell < Last)
            {
                agent.Cell++;
            }
            agent.Return += reward;
            if (!pressed && agent.Steps < LongestEpisode)
            {
                Ask(agent, reward);
                return;
            }
            Tell(pressed ? world.EndEpisode(agent.Id) : world.InterruptEpisode(agent.Id), agent, reward);
            EpisodeEnded(agent.Return);
            agent.Playing = false;
            agent.Wait = 1 + (int)(Random.Next(slot) % 4);
        }

        private void Ask(Agent agent, double reward)
        {
            Tell(world.RequestDecision(agent.Id), agent, reward)
                .SetActionMask(0, false, agent.Cell == 0, agent.Cell == Last)
                .SetActionMask(1, false, !agent.AtEnd);
        }

        private static Request Tell(Request request, Agent agent, double reward)
        {
            var seen = new float[Last + 3];
            seen[agent.Cell] = 1;
            seen[Last + 1] = agent.Goal;
            seen[Last + 2] = (float)(agent.Steps / (double)LongestEpisode);
            return request.SetReward((float)reward).SetObservation(0, seen);
        }

        private void Walk(Decision decision)
        {
            Values<float> seen = decision.Observation(0);
            bool right = seen[Last + 1] > 0;
            bool there = seen[right ? Last : 0] > 0;
            decision.SetDiscrete(0, there ? 0 : right ? 2 : 1);
            decision.SetDiscrete(1, there ? 1 : 0);
        }

        public static int Main(string[] arguments)
        {
            return Main(() => new Corridor(arguments));
        }
    }
}
