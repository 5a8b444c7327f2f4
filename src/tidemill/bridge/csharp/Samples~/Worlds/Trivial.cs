using System;
using System.Runtime.InteropServices;

namespace Tidemill.Samples
{
    /// <summary>Agents that always see the same: what is left to measure is the bridge. --agents, --size, --groups; observations come from native memory.</summary>
    public sealed class Trivial : Program
    {
        private readonly World[] worlds;
        private readonly IntPtr seen;

        public Trivial(string[] arguments) : base(arguments, 1)
        {
            var agents = (int)Number(arguments, "--agents", 10);
            var size = (int)Number(arguments, "--size", 4);
            worlds = new World[(int)Number(arguments, "--groups", 1)];
            for (int i = 0; i < worlds.Length; i++)
            {
                worlds[i] = Bridge.Add(new World("trivial" + (i == 0 ? "" : i.ToString()), agents, new[] { new[] { size } }, 2));
            }
            var values = new float[size];
            for (int i = 0; i < size; i++)
            {
                values[i] = i;
            }
            seen = Marshal.AllocHGlobal(4 * size);
            Marshal.Copy(values, 0, seen, size);
        }

        protected override void Tick()
        {
            foreach (World world in worlds)
            {
                for (int agent = 0; agent < world.MaxAgents; agent++)
                {
                    world.RequestDecision(agent).SetObservationPointer(0, seen);
                }
            }
        }

        public static int Main(string[] arguments)
        {
            return Main(() => new Trivial(arguments));
        }
    }
}
