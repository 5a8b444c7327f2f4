// What the tests have the C# library do: each mode of this program is one simulator, or one list of mistakes.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Reflection;
using System.Runtime.InteropServices;
using System.Threading;
using Tidemill;

public static class Probe
{
    private static readonly int[][] Shapes = { new[] { 2 }, new[] { 2, 3 }, new[] { 2, 2, 2 } };

    public static int Main(string[] arguments)
    {
        CultureInfo.DefaultThreadCurrentCulture = CultureInfo.CurrentCulture = CultureInfo.InvariantCulture;
        int number = arguments.Length > 1 && arguments[1][0] != '-' ? int.Parse(arguments[1]) : 0;
        try
        {
            switch (arguments[0])
            {
                case "echo":
                    return Echo(arguments, number);
                case "late":
                    return Late(arguments, number);
                case "threads":
                    return Threads(arguments, number);
                case "channels":
                    return SideChannels(arguments, number);
                case "blittable":
                    return Blittable();
                case "jobs":
                    return Jobs(arguments, number);
                case "job-mistakes":
                    return JobMistakes();
                case "again":
                    return Again(arguments);
                case "three":
                    return Three(arguments, number);
                case "closes":
                    return Closes(arguments, number);
                case "idle":
                    return Idle(arguments);
                case "born":
                    return Born(arguments);
                case "mistakes":
                    return Mistakes();
                case "heuristic":
                    return HeuristicActs();
                case "deadline":
                    return Deadline(arguments);
            }
        }
        catch (BridgeException error)
        {
            Console.Error.WriteLine(error.GetType().Name + ": " + error.Message);
            return 3;
        }
        return 2;
    }

    /// <summary>
    /// Worlds "flat" (two continuous actions), "branchy" (branches 3 and 2) and, with number 1, "both". Agents 5, 6, 7 of each; in tick t agent 5 + t % 3 ends (even t) or is
    /// interrupted (odd t), in its stead 100 + t asks. Observation 0 is the agent's last action; value i of observation k is 1000 t + 10 id + i + k / 10; the reward t + id / 100.
    /// </summary>
    private static int Echo(string[] arguments, int number)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            var worlds = new List<World> { bridge.Add(new World("flat", 4, Shapes, 2)), bridge.Add(new World("branchy", 4, Shapes, 0, 3, 2)) };
            if (number == 1)
            {
                worlds.Add(bridge.Add(new World("both", 4, Shapes, 1, 2)));
            }
            var last = new Dictionary<string, float[]>();
            int tick = 0;
            bridge.OnReset += () => tick = 0;
            IntPtr native = Marshal.AllocHGlobal(32);
            do
            {
                foreach (World world in worlds)
                {
                    foreach (ActionEvent action in world.Actions)
                    {
                        var taken = new float[2];
                        for (int i = 0; i < action.Continuous.Count; i++)
                        {
                            taken[i] = action.Continuous[i];
                        }
                        for (int i = 0; i < action.Discrete.Count; i++)
                        {
                            taken[action.Continuous.Count + i] = action.Discrete[i];
                        }
                        last[world.Name + action.AgentId] = taken;
                    }
                    for (int id = 5; id < 8; id++)
                    {
                        bool ends = id == 5 + tick % 3;
                        Request request = !ends ? world.RequestDecision(id) : tick % 2 == 0 ? world.EndEpisode(id) : world.InterruptEpisode(id);
                        Fill(request, tick, id, last.ContainsKey(world.Name + id) ? last[world.Name + id] : new float[2], native);
                        if (ends)
                        {
                            Fill(world.RequestDecision(100 + tick), tick, 100 + tick, new float[2], native);
                        }
                        else if (world.BranchCount > 0)
                        {
                            request.SetActionMask(0, (tick + id) % world.BranchSize(0), true);
                        }
                    }
                }
                tick++;
            }
            while (bridge.Exchange());
            Console.WriteLine(bridge.Reason);
        }
        return 0;
    }

    private static void Fill(Request request, int tick, int id, float[] last, IntPtr native)
    {
        var values = new float[3 + 8];
        for (int i = 0; i < values.Length; i++)
        {
            values[i] = 1000 * tick + 10 * id + i - 2 + 0.1f;
        }
        var cube = new float[8];
        for (int i = 0; i < 8; i++)
        {
            cube[i] = 1000 * tick + 10 * id + i + 0.2f;
        }
        Marshal.Copy(cube, 0, native, 8);
        request.SetReward(tick + id / 100f).SetObservation(0, last).SetObservation(1, values, 2).SetObservationPointer(2, native);
    }

    /// <summary>World "w0" from the start, and one more at each exchange, until there are as many as asked for; then it goes on.</summary>
    private static int Late(string[] arguments, int number)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            int count = 0;
            do
            {
                if (count < number)
                {
                    bridge.Add(new World("w" + count, 1, new[] { new[] { 1 } }, 1));
                    count++;
                }
                for (int i = 0; i < count; i++)
                {
                    bridge.World("w" + i).RequestDecision(i).SetObservation(0, 1000 + i);
                }
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    /// <summary>Eight threads request the decisions of so many agents; the world has room for exactly them. Observation and reward are the agent's id.</summary>
    private static int Threads(string[] arguments, int number)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("many", number, new[] { new[] { 3 } }, 1));
            do
            {
                var threads = new Thread[8];
                for (int t = 0; t < threads.Length; t++)
                {
                    int first = t;
                    threads[t] = new Thread(() =>
                    {
                        for (int id = first; id < number; id += threads.Length)
                        {
                            world.RequestDecision(id).SetReward(id).SetObservation(0, id, id, id);
                        }
                    });
                    threads[t].Start();
                }
                foreach (Thread thread in threads)
                {
                    thread.Join();
                }
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    private sealed class Reversed : SideChannel
    {
        public Reversed() : base(new Guid("11112222-3333-4444-5555-666677778888"), 2000) { }

        public override void Receive(byte[] message)
        {
            Array.Reverse(message);
            Send(message);
        }
    }

    /// <summary>All channels; what came is told in a raw one as text, at each exchange. Number 1: the older framing.</summary>
    private static int SideChannels(string[] arguments, int number)
    {
        var channels = new Channels(number == 1 ? Framing.Type : Framing.Uuid);
        RawBytes raw = channels.Register(new RawBytes(new Guid("aaaabbbb-cccc-dddd-eeee-ffff00001111"), 7));
        FloatProperties properties = channels.Register(new FloatProperties());
        EngineSettings engine = channels.Register(new EngineSettings());
        EnvironmentParameters parameters = channels.Register(new EnvironmentParameters());
        Statistics statistics = channels.Register(new Statistics());
        channels.Register(new Reversed());
        using (var bridge = Bridge.FromCommandLine(arguments, channels))
        {
            World world = bridge.Add(new World("w", 1, new[] { new[] { 1 } }, 1));
            int tick = 0;
            statistics.Add("before", 5, Statistics.How.MostRecent);
            do
            {
                foreach (byte[] message in raw.Take())
                {
                    raw.Send(message);
                }
                statistics.Add("ticks", tick, Statistics.How.Sum);
                var told = new List<string> { engine.Width + "x" + engine.Height, engine.QualityLevel.ToString(), engine.TimeScale.ToString(), engine.TargetFrameRate.ToString(), engine.CaptureFrameRate.ToString() };
                foreach (string name in parameters.Names)
                {
                    told.Add(name + "=" + parameters.Get(name, 0));
                }
                told.Add("gravity=" + properties.Get("gravity", -1));
                told.Add("unknown=" + channels.Unknown);
                raw.Send(System.Text.Encoding.ASCII.GetBytes(string.Join(" ", told)));
                properties.Set("tick", tick++);
                world.RequestDecision(0);
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    /// <summary>Five agents ask; from then on all of them end their episode and ask in the same exchange.</summary>
    private static int Again(string[] arguments)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("again", 5, new[] { new[] { 4 } }, 2));
            int tick = 0;
            do
            {
                for (int id = 0; tick > 0 && id < 5; id++)
                {
                    world.EndEpisode(id).SetReward(id);
                }
                for (int id = 0; id < 5; id++)
                {
                    world.RequestDecision(id).SetReward(10 + id);
                }
                tick++;
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    /// <summary>Three worlds that are new in one turn, with side-channel data for which there is no room; closes after so many exchanges.</summary>
    private static int Three(string[] arguments, int number)
    {
        var channels = new Channels();
        Statistics statistics = channels.Register(new Statistics());
        using (Bridge bridge = Bridge.FromCommandLine(arguments, channels))
        {
            var worlds = new List<World>();
            foreach (string name in new[] { "a", "b", "c" })
            {
                worlds.Add(bridge.Add(new World(name, 1, new[] { new[] { 1 } }, 1)));
            }
            bool going = true;
            for (int i = 0; i < number && going; i++)
            {
                statistics.Add("a name of some length, so that there is no room", i);
                foreach (World world in worlds)
                {
                    world.RequestDecision(0).SetReward(i);
                }
                going = bridge.Exchange();
            }
        }
        return 0;
    }

    /// <summary>Closes after so many exchanges.</summary>
    private static int Closes(string[] arguments, int number)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("w", 1, new[] { new[] { 1 } }, 1));
            for (int i = 0; i < number; i++)
            {
                world.RequestDecision(0);
                bridge.Exchange();
            }
        }
        Console.WriteLine("closed");
        return 0;
    }

    /// <summary>Never requests anything; ends when the trainer has left, and tells the resets.</summary>
    private static int Idle(string[] arguments)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            bridge.Add(new World("w", 1, new[] { new[] { 1 } }, 1));
            bridge.OnReset += () => Console.WriteLine("reset");
            while (bridge.Exchange())
            {
                Thread.Sleep(1);
            }
            Console.WriteLine(bridge.Reason);
        }
        return 0;
    }

    /// <summary>Agents are made by a reset only.</summary>
    private static int Born(string[] arguments)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("born", 1, new[] { new[] { 1 } }, 1));
            int resets = 0;
            bridge.OnReset += () => resets++;
            do
            {
                if (resets > 0)
                {
                    world.RequestDecision(resets);
                }
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    /// <summary>A job by shape: agent `i` of an even number asks, of an odd one ends, which in multiples of 3 is an interruption. Observations tell the agent.</summary>
    private unsafe struct TellJob
    {
        public JobWorld World;
        public float* Seen; // 6 values each
        public int Tick;

        public void Execute(int i)
        {
            JobRequest request = i % 2 == 0 ? World.RequestDecision(i) : i % 3 == 0 ? World.InterruptEpisode(i) : World.EndEpisode(i);
            request.SetReward(i + 0.5f).SetObservation(0, i, Tick).SetObservation(1, Seen + 6 * i, 6);
            if (i % 2 == 0)
            {
                request.SetActionMask(0, i % 3, true);
            }
        }
    }

    /// <summary>A job by shape: what agent `i` is to do, kept for the next tick.</summary>
    private unsafe struct HearJob
    {
        public JobWorld World;
        public float* Seen;

        public void Execute(int i)
        {
            JobAction action = World.Action(i);
            Seen[6 * action.AgentId + 4] = action.Continuous(0);
            Seen[6 * action.AgentId + 5] = action.Discrete(0);
        }
    }

    /// <summary>So many agents, told of and heard by jobs that eight threads share.</summary>
    private static unsafe int Jobs(string[] arguments, int number)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("jobs", number, new[] { new[] { 2 }, new[] { 2, 3 } }, 1, 3));
            var tell = new TellJob { World = world.ForJobs(), Seen = (float*)Marshal.AllocHGlobal(24 * number) };
            var hear = new HearJob { World = world.ForJobs(), Seen = tell.Seen };
            for (int i = 0; i < 6 * number; i++)
            {
                tell.Seen[i] = i;
            }
            do
            {
                Share(world.ActionCount, hear.Execute);
                Share(number, tell.Execute);
                tell.Tick++;
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    private static void Share(int count, Action<int> execute)
    {
        var threads = new Thread[8];
        for (int t = 0; t < threads.Length; t++)
        {
            int first = t;
            threads[t] = new Thread(() =>
            {
                for (int i = first; i < count; i += threads.Length)
                {
                    execute(i);
                }
            });
            threads[t].Start();
        }
        foreach (Thread thread in threads)
        {
            thread.Join();
        }
    }

    /// <summary>Each type that jobs hold, and whether it is free of references, through and through.</summary>
    private static int Blittable()
    {
        foreach (Type type in new[] { typeof(JobWorld), typeof(JobRequest), typeof(JobAction), typeof(TellJob), typeof(HearJob) })
        {
            string reference = Reference(type);
            GCHandle pinned = GCHandle.Alloc(Activator.CreateInstance(type), GCHandleType.Pinned); // refused where there is a reference
            pinned.Free();
            Console.WriteLine(type.Name + " " + type.IsLayoutSequential + " " + (reference ?? "unmanaged"));
        }
        Console.WriteLine("Request " + Reference(typeof(Request)));
        return 0;
    }

    private static string Reference(Type type)
    {
        if (type.IsPrimitive || type.IsPointer || type.IsEnum)
        {
            return null;
        }
        if (!type.IsValueType)
        {
            return type.Name;
        }
        foreach (FieldInfo field in type.GetFields(BindingFlags.Instance | BindingFlags.Public | BindingFlags.NonPublic))
        {
            string inside = Reference(field.FieldType);
            if (inside != null)
            {
                return field.Name + ": " + inside;
            }
        }
        return null;
    }

    /// <summary>What jobs get wrong is an error of the next exchange, which drops all requests; the one after that is as if nothing had been.</summary>
    private static unsafe int JobMistakes()
    {
        var bridge = new Bridge(null);
        World world = bridge.Add(new World("small", 1, new[] { new[] { 3 } }, 1, 2));
        JobWorld jobs = world.ForJobs();
        JobRequest old = jobs.RequestDecision(7);
        bridge.Exchange();
        Console.WriteLine(jobs.ActionCount + " " + jobs.Action(0).AgentId);
        var mistakes = new Action[]
        {
            () => { jobs.RequestDecision(1); jobs.RequestDecision(2).SetReward(1); },
            () => { jobs.EndEpisode(1); jobs.InterruptEpisode(3); },
            () => old.SetReward(1),
            () => jobs.RequestDecision(4).SetObservation(1, 1, 2, 3),
            () => jobs.RequestDecision(4).SetObservation(0, 1, 2),
            () => jobs.EndEpisode(4).SetActionMask(0, 0, true),
            () => jobs.RequestDecision(4).SetActionMask(0, 2, true),
            () => jobs.Action(5).Continuous(0),
        };
        foreach (Action mistake in mistakes)
        {
            mistake();
            try
            {
                bridge.Exchange();
                Console.WriteLine("nothing");
            }
            catch (BridgeException error)
            {
                Console.WriteLine(error.Message);
            }
            bridge.Exchange();
            Console.WriteLine(world.ActionCount);
        }
        return 0;
    }

    private static int Deadline(string[] arguments)
    {
        using (Bridge bridge = Bridge.FromCommandLine(arguments))
        {
            World world = bridge.Add(new World("w", 1, new[] { new[] { 1 } }, 1));
            bridge.Deadline = TimeSpan.FromMilliseconds(1);
            do
            {
                world.RequestDecision(0);
            }
            while (bridge.Exchange());
        }
        return 0;
    }

    private sealed class Counter : IActuator
    {
        public readonly List<int> Agents = new List<int>();

        public void Act(ActionEvent action)
        {
            Agents.Add(action.AgentId);
        }
    }

    /// <summary>Without a trainer: the heuristic reads observations and masks, the actuator hears of each action; without a heuristic actions are zero.</summary>
    private static int HeuristicActs()
    {
        using (var bridge = new Bridge(null))
        {
            World clever = bridge.Add(new World("clever", 3, new[] { new[] { 2 } }, 1, 3));
            World still = bridge.Add(new World("still", 3, new[] { new[] { 2 } }, 1, 3));
            clever.Heuristic = decision =>
            {
                decision.SetContinuous(0, decision.Observation(0)[0] + decision.Observation(0)[1]);
                decision.SetDiscrete(0, decision.IsForbidden(0, 0) ? 1 : 0);
            };
            var counter = new Counter();
            clever.Actuator = counter;
            for (int tick = 0; tick < 2; tick++)
            {
                clever.RequestDecision(4).SetObservation(0, 1, 2);
                clever.RequestDecision(9).SetObservation(0, 3, 4).SetActionMask(0, true, false, false);
                clever.EndEpisode(5).SetReward(1);
                still.RequestDecision(1);
                Console.WriteLine(bridge.Exchange() + " " + bridge.HasTrainer + " " + bridge.Reason);
            }
            foreach (World world in new[] { clever, still })
            {
                foreach (ActionEvent action in world.Actions)
                {
                    Console.WriteLine(world.Name + " " + action.AgentId + " " + action.Continuous[0] + " " + action.Discrete[0]);
                }
            }
            Console.WriteLine(string.Join(" ", counter.Agents));
            bridge.Exchange();
            Console.WriteLine(clever.ActionCount + " " + counter.Agents.Count);
        }
        return 0;
    }

    /// <summary>One line per mistake: what it says.</summary>
    private static int Mistakes()
    {
        var bridge = new Bridge(null);
        World world = bridge.Add(new World("small", 2, new[] { new[] { 3 } }, 1, 2));
        Request first = world.RequestDecision(1);
        Request ended = world.EndEpisode(2);
        world.RequestDecision(4);
        world.EndEpisode(5);
        var mistakes = new Action[]
        {
            () => world.RequestDecision(3),
            () => world.InterruptEpisode(3),
            () => first.SetObservation(0, 1, 2),
            () => first.SetObservation(1, 1, 2, 3),
            () => first.SetObservation(0, new float[4], 2),
            () => first.SetObservation(0, new float[4], -1),
            () => first.SetActionMask(1, true),
            () => first.SetActionMask(0, true),
            () => first.SetActionMask(0, 2, true),
            () => ended.SetActionMask(0, 1, true),
            () => bridge.World("smal"),
            () => bridge.Add(new World("small", 2, new int[0][], 1)),
            () => new World("", 2, new int[0][], 1),
            () => new World(new string('n', 64), 2, new int[0][], 1),
            () => new World("größe", 2, new int[0][], 1),
            () => new World("w", 0, new int[0][], 1),
            () => new World("w", 2, new[] { new[] { 2, 0 } }, 1),
            () => new World("w", 2, new[] { new[] { 1, 2, 3, 4 } }, 1),
            () => new World("w", 2, new[] { new[] { 65536, 65536 } }, 1),
            () => new World("w", 1 << 20, new[] { new[] { 1000 } }, 1),
            () => new World("w", int.MaxValue, new[] { new[] { int.MaxValue - 1 } }, int.MaxValue, int.MaxValue),
            () => new World("w", 2, new int[0][], -1),
            () => new World("w", 2, new int[0][], 0, 3, 0),
            () => { bridge.Exchange(); first.SetReward(1); },
            () => { ActionEvent old = world.Action(0); world.RequestDecision(1); bridge.Exchange(); float stale = old.Continuous[0]; },
            () => { world.Heuristic = d => d.SetDiscrete(1, 0); world.RequestDecision(1); bridge.Exchange(); },
            () => Bridge.FromCommandLine(new[] { "--memory-path" }),
            () => new Bridge("/nowhere/at/all"),
            () => new Statistics().Add("größe", 1),
        };
        foreach (Action mistake in mistakes)
        {
            try
            {
                mistake();
                Console.WriteLine("nothing");
            }
            catch (Exception error)
            {
                Console.WriteLine(error.GetType().Name + ": " + error.Message.Split('\n')[0]);
            }
        }
        return 0;
    }
}
