using System;
using System.Globalization;

namespace Tidemill.Samples
{
    /// <summary>Random numbers of the samples: a stream per slot, equal in every language.</summary>
    public sealed class Streams
    {
        private readonly uint[] states;

        public Streams(int slots)
        {
            states = new uint[slots];
        }

        public void Seed(uint seed)
        {
            for (int slot = 0; slot < states.Length; slot++)
            {
                states[slot] = unchecked(seed * 0x85EBCA6Bu + (uint)slot * 0xC2B2AE35u);
            }
        }

        public uint Next(int slot)
        {
            unchecked
            {
                states[slot] += 0x9E3779B9u;
                uint x = states[slot];
                x = (x ^ x >> 16) * 0x7FEB352Du;
                x = (x ^ x >> 15) * 0x846CA68Bu;
                return x ^ x >> 16;
            }
        }

        /// <summary>Evenly from [0, 1).</summary>
        public double Uniform(int slot)
        {
            return (Next(slot) >> 8) / 16777216.0;
        }
    }

    /// <summary>What the sample worlds share: the bridge, the command line, the seed, and the count of episodes.</summary>
    public abstract class Program
    {
        protected readonly EnvironmentParameters Parameters;
        protected readonly Statistics Statistics;
        protected readonly Streams Random;
        private readonly long episodes;
        private uint seed;
        private long ended;
        private double returns;

        protected Program(string[] arguments, int slots)
        {
            var channels = new Channels(Text(arguments, "--framing", "uuid") == "type" ? Framing.Type : Framing.Uuid);
            Parameters = channels.Register(new EnvironmentParameters());
            Statistics = channels.Register(new Statistics());
            Bridge = Bridge.FromCommandLine(arguments, channels);
            Random = new Streams(slots);
            seed = (uint)Number(arguments, "--seed", 1);
            episodes = Number(arguments, "--episodes", 100);
            Random.Seed(seed);
            Bridge.OnReset += Reset;
        }

        public Bridge Bridge { get; }

        /// <summary>Begin anew, as at the start; random numbers go on, unless the trainer has set another seed.</summary>
        protected virtual void Reset()
        {
            float given = Parameters.Get("seed", float.NaN);
            uint wanted = float.IsNaN(given) ? seed : unchecked((uint)(long)given);
            if (wanted != seed)
            {
                seed = wanted;
                Random.Seed(seed);
            }
        }

        /// <summary>Let all agents act, and request what they need.</summary>
        protected abstract void Tick();

        protected void EpisodeEnded(double sum)
        {
            ended++;
            returns += sum;
        }

        /// <summary>Until the trainer leaves; without a trainer, for as many episodes as the command line says.</summary>
        public int Run()
        {
            using (Bridge)
            {
                bool trained = Bridge.HasTrainer;
                while (trained ? Bridge.HasTrainer : ended < episodes)
                {
                    Tick();
                    Bridge.Exchange();
                }
                if (!trained)
                {
                    Console.WriteLine(string.Format(CultureInfo.InvariantCulture, "mean return {0:F4} over {1} episodes", returns / ended, ended));
                }
            }
            return 0;
        }

        public static long Number(string[] arguments, string option, long standard)
        {
            string text = Text(arguments, option, null);
            long number;
            if (text != null && !long.TryParse(text, NumberStyles.Integer, CultureInfo.InvariantCulture, out number))
            {
                throw new BridgeException(option + " " + text + ": it should be a whole number.");
            }
            return text == null ? standard : long.Parse(text, CultureInfo.InvariantCulture);
        }

        public static string Text(string[] arguments, string option, string standard)
        {
            int at = Array.IndexOf(arguments, option);
            return at >= 0 && at + 1 < arguments.Length ? arguments[at + 1] : standard;
        }

        /// <summary>Run a program; what went wrong is one line.</summary>
        public static int Main(Func<Program> make)
        {
            try
            {
                return make().Run();
            }
            catch (BridgeException error)
            {
                Console.Error.WriteLine(error.Message);
                return 1;
            }
        }
    }
}
