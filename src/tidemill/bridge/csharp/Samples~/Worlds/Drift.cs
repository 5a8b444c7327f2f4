using System;
using System.Runtime.InteropServices;
using System.Threading.Tasks;

namespace Tidemill.Samples
{
    /// <summary>
    /// Many points on a line, each with a goal of its own, moved and told of by jobs. In Unity the two jobs implement IJobParallelFor, bear [BurstCompile], have
    /// NativeArray fields instead of pointers, and are scheduled; here threads call them.
    /// </summary>
    public sealed unsafe class Drift : Program
    {
        private const int LongestEpisode = 20;
        private const float Near = 0.1f;

        /// <summary>Read action `i` and move the agent that it is for.</summary>
        public struct MoveJob
        {
            public JobWorld World;
            public float* Places;

            public void Execute(int i)
            {
                JobAction action = World.Action(i);
                Places[action.AgentId] += 0.1f * Math.Max(-1, Math.Min(1, action.Continuous(0)));
            }
        }

        /// <summary>Tell of agent `i`: where it is, and what it has earned; or that it has arrived, or has had its time.</summary>
        public struct SenseJob
        {
            public JobWorld World;
            public float* Places;
            public float* Goals;
            public int* Steps;
            public float* Earned;

            public void Execute(int i)
            {
                float distance = Math.Abs(Goals[i] - Places[i]);
                bool arrived = distance < Near;
                bool over = arrived || Steps[i] == LongestEpisode;
                JobRequest request = arrived ? World.EndEpisode(i) : over ? World.InterruptEpisode(i) : World.RequestDecision(i);
                float reward = arrived ? 1 : -0.01f * distance;
                request.SetReward(reward).SetObservation(0, Places[i], Goals[i]);
                Earned[i] = reward + (Steps[i] == 0 ? 0 : Earned[i]);
                Steps[i] = over ? 0 : Steps[i] + 1;
                if (over)
                {
                    Places[i] = 0; // it asks again in the next exchange
                }
            }
        }

        private readonly World world;
        private readonly int agents;
        private MoveJob move;
        private SenseJob sense;

        public Drift(string[] arguments) : base(arguments, 1)
        {
            agents = (int)Number(arguments, "--agents", 64);
            world = Bridge.Add(new World("drift", agents, new[] { new[] { 2 } }, 1));
            world.Heuristic = decision => decision.SetContinuous(0, decision.Observation(0)[1] - decision.Observation(0)[0] > 0 ? 1 : -1);
            var places = (float*)Marshal.AllocHGlobal(4 * agents);
            sense = new SenseJob
            {
                World = world.ForJobs(),
                Places = places,
                Goals = (float*)Marshal.AllocHGlobal(4 * agents),
                Steps = (int*)Marshal.AllocHGlobal(4 * agents),
                Earned = (float*)Marshal.AllocHGlobal(4 * agents),
            };
            move = new MoveJob { World = world.ForJobs(), Places = places };
            Begin();
        }

        protected override void Reset()
        {
            base.Reset();
            Begin();
        }

        private void Begin()
        {
            for (int i = 0; i < agents; i++)
            {
                sense.Places[i] = 0;
                sense.Goals[i] = (i % 2 == 0 ? 1 : -1) * (0.3f + 0.5f * i / agents);
                sense.Steps[i] = 0;
            }
        }

        protected override void Tick()
        {
            Parallel.For(0, world.ActionCount, move.Execute);
            Parallel.For(0, agents, sense.Execute);
            for (int i = 0; i < agents; i++)
            {
                if (sense.Steps[i] == 0)
                {
                    EpisodeEnded(sense.Earned[i]);
                }
            }
        }

        public static int Main(string[] arguments)
        {
            return Main(() => new Drift(arguments));
        }
    }
}
