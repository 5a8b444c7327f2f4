using System;
using System.Collections.Generic;

namespace Tidemill
{
    /// <summary>Bytes as they are: what came is in <see cref="Take"/>, in order.</summary>
    public sealed class RawBytes : SideChannel
    {
        private List<byte[]> came = new List<byte[]>();

        /// <param name="number">Tells raw channels apart where the framing is <see cref="Framing.Type"/>: 0 to 999.</param>
        public RawBytes(Guid id, int number = 0) : base(id, 1000 + number) { }

        public override void Receive(byte[] message)
        {
            came.Add(message);
        }

        /// <summary>The messages that came since the last call.</summary>
        public IReadOnlyList<byte[]> Take()
        {
            List<byte[]> messages = came;
            came = new List<byte[]>();
            return messages;
        }
    }

    /// <summary>Numbers by name that both sides set and both see.</summary>
    public sealed class FloatProperties : SideChannel
    {
        private readonly Dictionary<string, float> values = new Dictionary<string, float>();

        public FloatProperties() : base(new Guid("60ccf7d0-4f7e-11ea-b238-784f4387d1f7"), 1) { }

        public void Set(string name, float value)
        {
            Send(new MessageWriter().Text(name).Number(value).ToArray());
            values[name] = value;
        }

        public float Get(string name, float standard)
        {
            float value;
            return values.TryGetValue(name, out value) ? value : standard;
        }

        public override void Receive(byte[] message)
        {
            var reader = new MessageReader(message, "float properties");
            string name = reader.Text();
            float value = reader.Number();
            reader.End();
            values[name] = value;
        }
    }

    /// <summary>What the trainer wants of the engine; null where it has said nothing. The simulator applies it as its engine does.</summary>
    public sealed class EngineSettings : SideChannel
    {
        public EngineSettings() : base(new Guid("e951342c-4f7e-11ea-b238-784f4387d1f7"), 2) { }

        public int? Width { get; private set; }

        public int? Height { get; private set; }

        public int? QualityLevel { get; private set; }

        /// <summary>Game seconds per second.</summary>
        public float? TimeScale { get; private set; }

        public int? TargetFrameRate { get; private set; }

        public int? CaptureFrameRate { get; private set; }

        /// <summary>A setting has changed.</summary>
        public event Action<EngineSettings> OnChange;

        public override void Receive(byte[] message)
        {
            var reader = new MessageReader(message, "engine settings");
            if (message.Length == 20) // all at once, as older trainers do; the longest of the others has 12 bytes
            {
                Width = reader.Integer();
                Height = reader.Integer();
                QualityLevel = reader.Integer();
                TimeScale = reader.Number();
                TargetFrameRate = reader.Integer();
            }
            else
            {
                int what = reader.Integer();
                switch (what)
                {
                    case 0:
                        int width = reader.Integer();
                        Height = reader.Integer();
                        Width = width;
                        break;
                    case 1:
                        QualityLevel = reader.Integer();
                        break;
                    case 2:
                        TimeScale = reader.Number();
                        break;
                    case 3:
                        TargetFrameRate = reader.Integer();
                        break;
                    case 4:
                        CaptureFrameRate = reader.Integer();
                        break;
                    default:
                        throw reader.Wrong("there is no setting " + what);
                }
            }
            reader.End();
            if (OnChange != null)
            {
                OnChange(this);
            }
        }
    }

    /// <summary>Numbers that the simulator tells the trainer, where they become metrics of the run. Safe from many threads.</summary>
    public sealed class Statistics : SideChannel
    {
        /// <summary>What becomes of several values of one name.</summary>
        public enum How
        {
            Average,
            MostRecent,
            Sum,
        }

        public Statistics() : base(new Guid("a1d8f7b7-cec8-50f9-b78b-d3e165a78520"), 4) { }

        public void Add(string name, float value, How how = How.Average)
        {
            Send(new MessageWriter().Text(name).Number(value).Integer((int)how).ToArray());
        }

        public override void Receive(byte[] message)
        {
            // They go from the simulator to the trainer only.
        }
    }

    /// <summary>Parameters that the trainer sets for the environment: numbers, or samplers that are drawn from anew at each <see cref="Get"/>.</summary>
    public sealed class EnvironmentParameters : SideChannel
    {
        private readonly Dictionary<string, Func<float>> draws = new Dictionary<string, Func<float>>();

        public EnvironmentParameters() : base(new Guid("534c891e-810f-11ea-a9d0-822485860400"), 3) { }

        /// <summary>The parameter's value, or a draw where the trainer has set a sampler; `standard` where it was not set.</summary>
        public float Get(string name, float standard)
        {
            Func<float> draw;
            return draws.TryGetValue(name, out draw) ? draw() : standard;
        }

        /// <summary>The names that the trainer has set.</summary>
        public IEnumerable<string> Names { get { return draws.Keys; } }

        public override void Receive(byte[] message)
        {
            var reader = new MessageReader(message, "environment parameters");
            string name = reader.Text();
            int kind = reader.Integer();
            Func<float> draw;
            if (kind == 0)
            {
                float value = reader.Number();
                draw = () => value;
            }
            else if (kind == 1)
            {
                draw = Sampler(reader, new Random(reader.Integer()));
            }
            else
            {
                throw reader.Wrong("there is no kind of parameter " + kind);
            }
            reader.End();
            draws[name] = draw;
        }

        private static Func<float> Sampler(MessageReader reader, Random random)
        {
            int kind = reader.Integer();
            switch (kind)
            {
                case 0:
                    return Ranges(reader, new[] { reader.Number(), reader.Number() }, random);
                case 1:
                    float mean = reader.Number();
                    float deviation = reader.Number();
                    if (deviation < 0)
                    {
                        throw reader.Wrong("a deviation is " + deviation);
                    }
                    return () => mean + deviation * Normal(random);
                case 2:
                    return Ranges(reader, reader.Numbers(), random);
                default:
                    throw reader.Wrong("there is no sampler " + kind);
            }
        }

        /// <summary>Evenly from ranges [low, high), each with a chance in proportion to its width; equal chances where all are points.</summary>
        private static Func<float> Ranges(MessageReader reader, float[] ends, Random random)
        {
            double total = 0;
            bool good = ends.Length >= 2 && ends.Length % 2 == 0;
            for (int i = 0; good && i < ends.Length; i += 2)
            {
                good = ends[i] <= ends[i + 1];
                total += (double)ends[i + 1] - ends[i];
            }
            if (!good)
            {
                throw reader.Wrong("ranges should be pairs, a lower number before a higher one");
            }
            return () =>
            {
                int range = 2 * random.Next(ends.Length / 2);
                if (total > 0)
                {
                    double left = random.NextDouble() * total;
                    for (range = 0; range < ends.Length - 2 && left >= (double)ends[range + 1] - ends[range]; range += 2)
                    {
                        left -= (double)ends[range + 1] - ends[range];
                    }
                }
                return (float)(ends[range] + ((double)ends[range + 1] - ends[range]) * random.NextDouble());
            };
        }

        private static float Normal(Random random)
        {
            double radius = Math.Sqrt(-2 * Math.Log(1 - random.NextDouble()));
            return (float)(radius * Math.Cos(2 * Math.PI * random.NextDouble()));
        }
    }
}
