using System;
using System.Threading.Tasks;

namespace Tidemill.Samples
{
    /// <summary>Ten agents in a square each walk to a target of their own. The requests are made by parallel threads.</summary>
    public sealed class Reach : Program
    {
        private const int Agents = 10;
        private const int LongestEpisode = 50;
        private const double Near = 0.1;

        private sealed class Agent
        {
            public bool Playing;
            public double X, Y, TargetX, TargetY;
            public int Steps;
            public double Return;
            public double ActionX, ActionY;

            public double Distance
            {
                get { return Math.Sqrt((TargetX - X) * (TargetX - X) + (TargetY - Y) * (TargetY - Y)); }
            }
        }

        private readonly World world;
        private readonly Agent[] agents = new Agent[Agents];
        private double speed;

        public Reach(string[] arguments) : base(arguments, Agents)
        {
            world = Bridge.Add(new World("reach", Agents, new[] { new[] { 4 } }, 2));
            world.Heuristic = Walk;
            for (int i = 0; i < Agents; i++)
            {
                agents[i] = new Agent();
            }
            ReadSpeed();
        }

        protected override void Reset()
        {
            base.Reset();
            ReadSpeed();
            foreach (Agent agent in agents)
            {
                agent.Playing = false;
            }
        }

        private void ReadSpeed()
        {
            float given = Parameters.Get("speed", float.NaN);
            speed = float.IsNaN(given) ? 0.1 : Clip(given, 0.01, 1); // not 0.1f, which is another number
        }

        protected override void Tick()
        {
            foreach (ActionEvent action in world.Actions)
            {
                agents[action.AgentId].ActionX = Clip(action.Continuous[0], -1, 1);
                agents[action.AgentId].ActionY = Clip(action.Continuous[1], -1, 1);
            }
            var ended = new bool[Agents];
            Parallel.For(0, Agents, i => ended[i] = Act(i, agents[i]));
            for (int i = 0; i < Agents; i++)
            {
                if (ended[i])
                {
                    Statistics.Add("reach/steps", agents[i].Steps);
                    EpisodeEnded(agents[i].Return);
                }
            }
        }

        private bool Act(int id, Agent agent)
        {
            if (!agent.Playing)
            {
                Begin(id, agent);
                Tell(world.RequestDecision(id), agent, 0);
                return false;
            }
            double before = agent.Distance;
            agent.X = Clip(agent.X + speed * agent.ActionX, -1, 1);
            agent.Y = Clip(agent.Y + speed * agent.ActionY, -1, 1);
            double after = agent.Distance;
            agent.Steps++;
            double reward = before - after + (after <= Near ? 1 : 0);
            agent.Return += reward;
            agent.Playing = after > Near && agent.Steps < LongestEpisode;
            Tell(after <= Near ? world.EndEpisode(id) : agent.Playing ? world.RequestDecision(id) : world.InterruptEpisode(id), agent, reward);
            return !agent.Playing;
        }

        private void Begin(int id, Agent agent)
        {
            agent.Playing = true;
            agent.Steps = 0;
            agent.Return = 0;
            agent.X = 2 * Random.Uniform(id) - 1;
            agent.Y = 2 * Random.Uniform(id) - 1;
            do
            {
                agent.TargetX = 2 * Random.Uniform(id) - 1;
                agent.TargetY = 2 * Random.Uniform(id) - 1;
            }
            while (agent.Distance <= Near);
        }

        private static void Tell(Request request, Agent agent, double reward)
        {
            request.SetReward((float)reward)
                .SetObservation(0, (float)(agent.TargetX - agent.X), (float)(agent.TargetY - agent.Y), (float)agent.X, (float)agent.Y);
        }

        private void Walk(Decision decision)
        {
            Values<float> seen = decision.Observation(0);
            decision.SetContinuous(0, (float)Clip(seen[0] / speed, -1, 1));
            decision.SetContinuous(1, (float)Clip(seen[1] / speed, -1, 1));
        }

        private static double Clip(double value, double low, double high)
        {
            return double.IsNaN(value) ? 0 : Math.Max(low, Math.Min(high, value));
        }

        public static int Main(string[] arguments)
        {
            return Main(() => new Reach(arguments));
        }
    }
}
